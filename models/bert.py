"""BERT (Devlin et al., 2018) as transformers' BertForPreTraining: masked words, and whether one sentence follows the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import jax
from flax import linen as nn
from jax import numpy as jnp

from .attention import Context, attend, unpadded
from .configs import JsonConfig, indivisible
from .layers import embedded, run_layers, words


@dataclass(frozen=True)
class Config(JsonConfig):
    """BERT's `config.json`."""

    MODEL_TYPE: ClassVar[str] = "bert"
    ARCHITECTURE: ClassVar[str] = "BertForPreTraining"
    ACTIVATION: ClassVar[str] = "hidden_act"
    ONLY: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute", "tie_word_embeddings": True}
    )

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0

    def conflicts(self) -> list[str]:
        """A head has hidden_size / num_attention_heads."""
        return indivisible("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)


NO_DROPOUT: Mapping[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LARGE: Mapping[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}

SIZES: Mapping[str, Config] = {
    "bert-base-uncased": Config(),
    "bert-large-uncased": Config(**LARGE),
    "bert-base-cased": Config(vocab_size=28996),
    "bert-large-cased": Config(vocab_size=28996, **LARGE),
    "bert-base-chinese": Config(vocab_size=21128),
}
"""transformers' name -> configuration: 110 and 335 million parameters without the heads."""

TINY = Config(
    vocab_size=97,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=16,
    **NO_DROPOUT,
)
"""For tests."""


class SelfAttention(nn.Module):
    """Attention of every place to every place that is not padding: [B, T, D] -> [B, T, D]."""

    config: Config
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """Return each place's mixture of all of them."""
        config = self.config
        shape = (*x.shape[:2], config.num_attention_heads, -1)
        q, k, v = (_dense(config, x.shape[-1], name)(x).reshape(shape) for name in ("query", "key", "value"))
        dropout = nn.Dropout(config.attention_probs_dropout_prob, deterministic=not self.train)
        return _dense(config, x.shape[-1], "output")(attend(q, k, v, context.visible, dropout))


class Layer(nn.Module):
    """Attention and two dense layers, each added to what it came from and normalised afterwards: [B, T, D] -> [B, T, D]."""

    config: Config
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, context: Context, cache: None) -> tuple[jax.Array, Any]:
        """Return norm(y + feedforward(y)) of y = norm(x + attention(x))."""
        config = self.config
        dropout = nn.Dropout(config.hidden_dropout_prob, deterministic=not self.train)
        y = SelfAttention(config, self.train, name="attention")(x, context)
        x = _norm(config, "attention_norm")(dropout(y) + x)
        inner = config.activation(_dense(config, config.intermediate_size, "intermediate")(x))
        return _norm(config, "output_norm")(dropout(_dense(config, x.shape[-1], "output")(inner)) + x), (None, None)


class Bert(nn.Module):
    """The encoder: words [B, T] of integers -> (features [B, T, D] of every place, features [B, D] of all), T at most as config says."""

    config: Config

    def setup(self) -> None:
        """Make the embedding of words, which the output uses too."""
        c = self.config
        self.word_embeddings = words(c.vocab_size, c.hidden_size, c.pad_token_id, c.initializer_range, "word_embeddings")
        self.body = _Body(c, name="body")

    def __call__(
        self, input_ids: jax.Array, attention_mask: jax.Array | None, token_type_ids: jax.Array | None, train: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Return every place's features, and those of the first place through a dense layer and tanh."""
        if input_ids.shape[1] > self.config.max_position_embeddings:
            raise ValueError(
                f"models.bert: input_ids: {input_ids.shape[1]} in a row, expected at most {self.config.max_position_embeddings}, for which "
                "there are positions"
            )
        x = embedded(self.word_embeddings, input_ids, self.config.pad_token_id)
        return self.body(x, Context(unpadded(attention_mask)), token_type_ids, train)

    def likeness(self, x: jax.Array) -> jax.Array:
        """Products with every word's embedding: [..., D] -> [..., vocabulary]."""
        return self.word_embeddings.attend(x)


class _Body(nn.Module):
    """What follows the embedding of words."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, context: Context, token_type_ids: jax.Array | None, train: bool) -> tuple[jax.Array, jax.Array]:
        config, width = self.config, x.shape[-1]
        initial = nn.initializers.normal(config.initializer_range)
        places = nn.Embed(config.max_position_embeddings, width, embedding_init=initial, name="position_embeddings")
        kinds = nn.Embed(config.type_vocab_size, width, embedding_init=initial, name="token_type_embeddings")
        x = x + (kinds.embedding[0] if token_type_ids is None else kinds(token_type_ids)) + places.embedding[: x.shape[1]]
        x = nn.Dropout(config.hidden_dropout_prob, deterministic=not train)(_norm(config, "norm")(x))
        x = run_layers(Layer, config, config.num_hidden_layers, "layer", x, context, None, train=train)[0]
        return x, jnp.tanh(_dense(config, width, "pooler")(x[:, 0]))


class BertForPreTraining(nn.Module):
    """BERT with the heads of its pretraining: input_ids [B, T] -> (logits of words, logits [B, 2]: the second sentence follows, or not)."""

    config: Config

    @nn.compact
    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        token_type_ids: jax.Array | None = None,
        masked_positions: jax.Array | None = None,
        train: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the logits of the word at every place, [B, T, vocabulary], or at masked_positions [B, M] only; and those of the sentence.

        attention_mask: [B, T], 0 where a place is padding; without it, none is. token_type_ids: [B, T], 0 in the first sentence, 1 in the
        second; without it, all are 0. `train` turns on dropout, from the stream "dropout".
        """
        config = self.config
        encoder = Bert(config, name="bert")
        x, pooled = encoder(input_ids, attention_mask, token_type_ids, train)
        if masked_positions is not None:
            x = jnp.take_along_axis(x, masked_positions[..., None], axis=1)  # [B, T, D] -> [B, M, D]
        x = _norm(config, "transform_norm")(config.activation(_dense(config, config.hidden_size, "transform")(x)))
        likely = encoder.likeness(x) + self.param("bias", nn.initializers.zeros, (config.vocab_size,))
        return likely, _dense(config, 2, "seq_relationship")(pooled)


def _dense(config: Config, width: int, name: str) -> nn.Dense:
    return nn.Dense(width, kernel_init=nn.initializers.normal(config.initializer_range), name=name)


def _norm(config: Config, name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=config.layer_norm_eps, name=name)


def torch_layers(config: Config) -> dict[str, str | None]:
    """Names in transformers' state dict -> places in the Flax parameters, as `tpuflow.importers.flax_params` and `state_dict` take them."""
    embeddings, layer, body = "[bert.]embeddings", "[bert.]encoder.layer.*", "bert/body/" + ("layer" if config.scan else "layer_*")
    parts = {
        **{f"attention.self.{name}": f"attention/{name}" for name in ("query", "key", "value")},
        "attention.output.dense": "attention/output",
        "attention.output.LayerNorm": "attention_norm",
        "intermediate.dense": "intermediate",
        "output.dense": "output",
        "output.LayerNorm": "output_norm",
    }
    return {
        f"{embeddings}.word_embeddings": "bert/word_embeddings",
        **{f"{embeddings}.{name}_embeddings": f"bert/body/{name}_embeddings" for name in ("position", "token_type")},
        f"{embeddings}.LayerNorm": "bert/body/norm",
        **{f"{layer}.{theirs}": f"{body}/{ours}" for theirs, ours in parts.items()},
        "[bert.]pooler.dense": "bert/body/pooler",
        "cls.predictions.transform.dense": "transform",
        "cls.predictions.transform.LayerNorm": "transform_norm",
        "cls.predictions.bias": "bias",
        "cls.predictions.decoder.weight": "bert/word_embeddings/embedding",
        "cls.predictions.decoder.bias": "bias",
        "cls.seq_relationship": "seq_relationship",
        **dict.fromkeys((f"{embeddings}.position_ids", f"{embeddings}.token_type_ids")),
    }


def pretraining_batch(batch: int, length: int, masked: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a batch for pretraining: the model's inputs, and under "masked_labels" and "next_sentence_label" what it learns."""
    places = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (batch, length))
    asked = dict.fromkeys(("masked_positions", "masked_labels"), (batch, masked))
    return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in {**places, **asked, "next_sentence_label": (batch,)}.items()}
