"""A decoder-only transformer: GPT-2's layers under GPT-2's names, from a tiny language model to one of 1.3 billion parameters."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

EPSILON = 1e-5
"""Of every layer normalisation; GPT-2's."""

KERNEL_INIT = nn.initializers.normal(0.02)
"""GPT-2's deviation for weights and embeddings."""


@dataclass(frozen=True)
class Config:
    """The sizes of a transformer, and how its layers are written down.

    `tied`: the output layer is the transposed embedding. `scan`: the layers are one `lax.scan` over stacked parameters, so that neither
    the program nor compiling it grows with the depth; otherwise each is written out. `remat`: a layer's inner values are computed again
    in the backward pass instead of being kept (`jax.checkpoint`).
    """

    vocabulary: int
    length: int
    width: int
    layers: int
    heads: int
    tied: bool = True
    scan: bool = False
    remat: bool = False


TINY = Config(vocabulary=97, length=16, width=32, layers=2, heads=4)
"""For tests."""

GPT2 = Config(vocabulary=50257, length=1024, width=768, layers=12, heads=12)
"""GPT-2, the smallest of the four: 124 million parameters."""

GPT3_XL = Config(vocabulary=50257, length=2048, width=2048, layers=24, heads=16)
"""1.3 billion parameters: GPT-3 XL's sizes; 16 heads of 128, where the paper's 24 of 128 would not make up its width."""


class Attention(nn.Module):
    """Causal self-attention: [B, T, D] -> [B, T, D]."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return each position's mixture of itself and those before it."""
        batch, length, width = x.shape
        joint = _dense(3 * width, "c_attn")(x).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (joint[:, :, i] for i in range(3))  # [B, T, 3, H, Dh] -> three of [B, T, H, Dh]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q * (width // self.heads) ** -0.5, k)
        ahead = jnp.arange(length)[:, None] < jnp.arange(length)
        weights = nn.softmax(jnp.where(ahead, jnp.finfo(scores.dtype).min, scores))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return _dense(width, "c_proj")(mixed.reshape(batch, length, width))  # [B, T, H, Dh] -> [B, T, D]


class Feedforward(nn.Module):
    """Two dense layers with a GELU between them, four times as wide inside: [..., D] -> [..., D]."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the second layer's outputs; the GELU is the one by tanh, as GPT-2's."""
        return _dense(x.shape[-1], "c_proj")(nn.gelu(_dense(4 * x.shape[-1], "c_fc")(x), approximate=True))


class Block(nn.Module):
    """One layer: attention and feedforward, each normalised before and added to what it came from: [B, T, D] -> [B, T, D]."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x + attention(norm(x)), and that plus feedforward(norm(that))."""
        x = x + Attention(self.heads, name="attn")(_norm("ln_1")(x))
        return x + Feedforward(name="mlp")(_norm("ln_2")(x))


class Transformer(nn.Module):
    """A language model: tokens [B, T] of integers -> logits [B, T, vocabulary] of each next token, T at most `config.length`."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits [B, T, vocabulary] of the token after each of tokens [B, T]; they see those at and before their place."""
        config = self.config
        embed = nn.Embed(config.vocabulary, config.width, embedding_init=KERNEL_INIT, name="wte")
        places = nn.Embed(config.length, config.width, embedding_init=KERNEL_INIT, name="wpe")
        x = embed(tokens) + places(jnp.arange(tokens.shape[1]))  # [B, T] -> [B, T, D]
        x = _norm("ln_f")(self._layers(x))
        if config.tied:
            return embed.attend(x)
        return nn.Dense(config.vocabulary, use_bias=False, kernel_init=KERNEL_INIT, name="lm_head")(x)

    def _layers(self, x: jax.Array) -> jax.Array:
        config = self.config
        kind = nn.remat(Block, prevent_cse=not config.scan) if config.remat else Block
        if config.scan:
            scan = nn.scan(_carried, variable_axes={"params": 0}, split_rngs={"params": True}, length=config.layers)
            return scan(kind(config.heads, name="h"), x, None)[0]
        for index in range(config.layers):
            x = kind(config.heads, name=f"h_{index}")(x)
        return x


def _carried(block: Any, x: jax.Array, _: None) -> tuple[jax.Array, None]:
    """A layer as `nn.scan` wants it: (carry, input) -> (carry, output)."""
    return block(x), None


def _dense(width: int, name: str) -> nn.Dense:
    return nn.Dense(width, kernel_init=KERNEL_INIT, name=name)


def _norm(name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=EPSILON, name=name)


def torch_layers(model: Transformer) -> dict[str, str]:
    """PyTorch module name -> Flax module name, for layers that are written out one by one and whose weights are those of `Linear`.

    (The published GPT-2 keeps the kernels of `c_attn`, `c_fc` and `c_proj` the other way round: [in, out].)
    """
    parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    layers = {f"h.{i}.{part}": f"h_{i}/{part.replace('.', '/')}" for i in range(model.config.layers) for part in parts}
    head = {} if model.config.tied else {"lm_head": "lm_head"}
    return {"wte": "wte", "wpe": "wpe", **layers, "ln_f": "ln_f", **head}


def transformer_1b3_step(batch: int) -> tuple[Transformer, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """What a training step of the 1.3-billion-parameter model takes: the model, tokens [batch, 2048], next tokens [batch, 2048].

    Its layers are written out one by one and checkpointed, which a chip with 32 GiB needs from the second sequence on.
    """
    return _step(dataclasses.replace(GPT3_XL, remat=True), batch)


def transformer_1b3_scan_step(batch: int) -> tuple[Transformer, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """The same with its layers in a scan."""
    return _step(dataclasses.replace(GPT3_XL, remat=True, scan=True), batch)


def transformer_1b3_kept_step(batch: int) -> tuple[Transformer, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """The same with layers written out one by one whose activations are all kept for the backward pass."""
    return _step(GPT3_XL, batch)


def _step(config: Config, batch: int) -> tuple[Transformer, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    tokens = jax.ShapeDtypeStruct((batch, config.length), jnp.int32)
    return Transformer(config), (tokens, tokens)
