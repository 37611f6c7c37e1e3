"""BERT (Devlin et al., 2018): the encoder, and its pretraining of masked words."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn

EPSILON = 1e-12
"""Of every layer normalisation."""

KERNEL_INIT = nn.initializers.truncated_normal(0.02)


@dataclass(frozen=True)
class Config:
    """The sizes of an encoder: a feedforward layer is four times as wide as the model, a head has width / heads."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    length: int = 512
    kinds: int = 2
    dropout: float = 0.1


TINY = Config(vocabulary=97, width=32, layers=2, heads=4, length=16)
"""For tests."""

BASE = Config(vocabulary=30522, width=768, layers=12, heads=12)
"""110 million parameters."""

LARGE = Config(vocabulary=30522, width=1024, layers=24, heads=16)
"""335 million parameters."""


class SelfAttention(nn.Module):
    """Attention of every place to every place that is not padding: [B, T, D] -> [B, T, D]."""

    heads: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, hidden: jax.Array, train: bool) -> jax.Array:
        """Return each place's mixture of all of them; hidden [B, T] is true where nothing is to be seen."""
        batch, length, width = x.shape
        q, k, v = (dense(width, name)(x).reshape(batch, length, self.heads, -1) for name in ("query", "key", "value"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // self.heads) ** -0.5
        scores = jnp.where(hidden[:, None, None], jnp.finfo(scores.dtype).min, scores)
        weights = nn.Dropout(self.dropout, deterministic=not train)(nn.softmax(scores))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return dense(width, "output")(mixed.reshape(batch, length, width))  # [B, T, H, Dh] -> [B, T, D]


class Layer(nn.Module):
    """Attention and two dense layers, each added to what it came from and normalised afterwards: [B, T, D] -> [B, T, D]."""

    heads: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, hidden: jax.Array, train: bool) -> jax.Array:
        """Return norm(y + feedforward(y)) of y = norm(x + attention(x))."""
        y = SelfAttention(self.heads, self.dropout, name="attention")(x, hidden, train)
        x = _norm("attention_norm")(x + nn.Dropout(self.dropout, deterministic=not train)(y))
        y = dense(x.shape[-1], "output")(nn.gelu(dense(4 * x.shape[-1], "intermediate")(x), approximate=True))
        return _norm("output_norm")(x + nn.Dropout(self.dropout, deterministic=not train)(y))


class Bert(nn.Module):
    """The encoder: words and kinds of sentence, two of [B, T], integers -> [B, T, D]. A word 0 is padding."""

    config: Config

    def setup(self) -> None:
        """Make the layers; the embedding of words is used by the output too."""
        c = self.config
        self.words = nn.Embed(c.vocabulary, c.width, embedding_init=KERNEL_INIT)
        self.kinds = nn.Embed(c.kinds, c.width, embedding_init=KERNEL_INIT)
        self.places = nn.Embed(c.length, c.width, embedding_init=KERNEL_INIT)
        self.norm = _norm("norm")
        self.dropout = nn.Dropout(c.dropout)
        self.layers = [Layer(c.heads, c.dropout, name=f"layer_{i}") for i in range(c.layers)]

    def __call__(self, words: jax.Array, kinds: jax.Array, train: bool = False) -> jax.Array:
        """Return every place's features [B, T, D]."""
        x = self.words(words) + self.kinds(kinds) + self.places(jnp.arange(words.shape[1]))  # [B, T] -> [B, T, D]
        x = self.dropout(self.norm(x), deterministic=not train)
        for layer in self.layers:
            x = layer(x, words == 0, train)
        return x

    def likeness(self, x: jax.Array) -> jax.Array:
        """Products with every word's embedding: [..., D] -> [..., vocabulary]."""
        return self.words.attend(x)


class MaskedWords(nn.Module):
    """Pretraining: batches [B, 3, T] of words, kinds of sentence, and (the first `masked` of the row) places -> logits [B, masked, words].

    The other half of BERT's pretraining, whether one sentence follows the other, is one product of width x 2 and is left out.
    """

    config: Config
    masked: int

    @nn.compact
    def __call__(self, batch: jax.Array, train: bool = False) -> jax.Array:
        """Return the logits of the words at the masked places; `train` turns on dropout, from the stream "dropout"."""
        encoder = Bert(self.config, name="bert")
        x = encoder(batch[:, 0], batch[:, 1], train)  # -> [B, T, D]
        x = jnp.take_along_axis(x, batch[:, 2, : self.masked, None], axis=1)  # -> [B, masked, D]
        x = _norm("transform_norm")(nn.gelu(dense(self.config.width, "transform")(x), approximate=True))
        return encoder.likeness(x) + self.param("bias", nn.initializers.zeros, (self.config.vocabulary,))


def dense(width: int, name: str) -> nn.Dense:
    """A dense layer with BERT's initial weights."""
    return nn.Dense(width, kernel_init=KERNEL_INIT, name=name)


def _norm(name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=EPSILON, name=name)


def bert_base_step(batch: int) -> tuple[MaskedWords, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """What a pretraining step of BERT-base takes at 128 words, 20 of them masked: the model, batch [batch, 3, 128], words [batch, 20]."""
    return MaskedWords(BASE, 20), (jax.ShapeDtypeStruct((batch, 3, 128), jnp.int32), jax.ShapeDtypeStruct((batch, 20), jnp.int32))
