"""GPT-2 (Radford et al., 2019) under the names of transformers' GPT2LMHeadModel, from a tiny model to one of 1.3 billion parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import jax
from flax import linen as nn
from jax import numpy as jnp

from .attention import Context, attend, remember
from .causal import CausalModel, Inputs
from .configs import JsonConfig, indivisible
from .layers import run_layers


@dataclass(frozen=True)
class Config(JsonConfig):
    """GPT-2's `config.json`. `n_inner` None: a feedforward layer is four times as wide as the model."""

    MODEL_TYPE: ClassVar[str] = "gpt2"
    ARCHITECTURE: ClassVar[str] = "GPT2LMHeadModel"
    ACTIVATION: ClassVar[str] = "activation_function"
    ONLY: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    )

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256

    def conflicts(self) -> list[str]:
        """A head has n_embd / n_head."""
        return indivisible("n_embd", self.n_embd, "n_head", self.n_head)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, heads of keys and values, their width."""
        return self.n_layer, self.n_head, self.n_embd // self.n_head

    @property
    def position_limit(self) -> int | None:
        """How long a sequence may be."""
        return self.n_positions


SIZES: Mapping[str, Config] = {
    "gpt2": Config(),
    "gpt2-medium": Config(n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": Config(n_embd=1280, n_layer=36, n_head=20),
    "gpt2-xl": Config(n_embd=1600, n_layer=48, n_head=25),
}
"""transformers' name -> configuration: 124, 355, 774 and 1558 million parameters."""

NO_DROPOUT: Mapping[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

TINY = Config(vocab_size=97, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None, **NO_DROPOUT)
"""For tests."""

GPT3_XL = Config(n_positions=2048, n_embd=2048, n_layer=24, n_head=16, **NO_DROPOUT)
"""1.3 billion parameters: GPT-3 XL's sizes; 16 heads of 128, where the paper's 24 of 128 would not make up its width."""


class Attention(nn.Module):
    """Causal self-attention: [B, T, D] -> [B, T, D]."""

    config: Config
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, context: Context, cache: Any) -> tuple[jax.Array, Any]:
        """Return each position's mixture of itself and those before it, and the keys and values that are kept."""
        config, (batch, length, width) = self.config, x.shape
        joint = _dense(config, 3 * width, "c_attn")(x).reshape(batch, length, 3, config.n_head, width // config.n_head)
        q, k, v = (joint[:, :, i] for i in range(3))  # [B, T, 3, H, D] -> three of [B, T, H, D]
        k, v, kept = remember(cache, k, v, context)
        mixed = attend(q, k, v, context.visible, nn.Dropout(config.attn_pdrop, deterministic=not self.train))
        return _dense(config, width, "c_proj", residual=True)(mixed), kept


class Feedforward(nn.Module):
    """Two dense layers with an activation between them: [..., D] -> [..., D]."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the second layer's outputs."""
        config, width = self.config, x.shape[-1]
        inner = config.activation(_dense(config, config.n_inner or 4 * width, "c_fc")(x))
        return _dense(config, width, "c_proj", residual=True)(inner)


class Block(nn.Module):
    """One layer: attention and feedforward, each normalised before and added to what it came from: [B, T, D] -> [B, T, D]."""

    config: Config
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, context: Context, cache: Any) -> tuple[jax.Array, Any]:
        """Return y = x + attention(norm(x)) plus feedforward(norm(y)), and the keys and values that are kept."""
        dropout = nn.Dropout(self.config.resid_pdrop, deterministic=not self.train)
        mixed, kept = Attention(self.config, self.train, name="attn")(_norm(self.config, "ln_1")(x), context, cache)
        x = x + dropout(mixed)
        return x + dropout(Feedforward(self.config, name="mlp")(_norm(self.config, "ln_2")(x))), (kept, None)


class GPT2(CausalModel):
    """A language model: tokens [B, T] of integers -> logits [B, T, vocabulary] of each next token, T at most `config.n_positions`."""

    config: Config

    @nn.compact
    def run(self, inputs: Inputs) -> tuple[jax.Array, Any]:
        """As `CausalModel.run` says."""
        config, tokens, positions = self.config, inputs.tokens, inputs.positions
        initial = nn.initializers.normal(config.initializer_range)
        embed = nn.Embed(config.vocab_size, config.n_embd, embedding_init=initial, name="wte")
        places = nn.Embed(config.n_positions, config.n_embd, embedding_init=initial, name="wpe")
        x = embed(tokens) + (places.embedding[: tokens.shape[1]] if positions is None else places(positions))  # -> [B, T, D]
        x = nn.Dropout(config.embd_pdrop, deterministic=not inputs.train)(x)
        x, kept, _ = run_layers(Block, config, config.n_layer, "h", x, inputs.context, inputs.cache, train=inputs.train)
        x = _norm(config, "ln_f")(x[:, -1:] if inputs.last else x)
        if config.tie_word_embeddings:
            return embed.attend(x), kept
        return nn.Dense(config.vocab_size, use_bias=False, kernel_init=initial, name="lm_head")(x), kept


def _dense(config: Config, width: int, name: str, *, residual: bool = False) -> nn.Dense:
    """A dense layer; what 2 * n_layer of them add to one sum, one after the other, starts smaller by the root of that number."""
    deviation = config.initializer_range * ((2 * config.n_layer) ** -0.5 if residual else 1.0)
    return nn.Dense(width, kernel_init=nn.initializers.normal(deviation), name=name)


def _norm(config: Config, name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=config.layer_norm_epsilon, name=name)


def torch_layers(config: Config) -> dict[str, str | None]:
    """Names in transformers' state dict -> places in the Flax parameters, as `tpuflow.importers.flax_params` and `state_dict` take them.

    What is named down to the tensor keeps its axes: the kernels of transformers' Conv1D are [in, out] as Flax's. Files of GPT2Model, the
    published ones among them, have names without "transformer.", and the causal masks of each layer.
    """
    layer = "h" if config.scan else "h_*"
    dense = [(part, part.replace(".", "/")) for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    return {
        "[transformer.]wte": "wte",
        "[transformer.]wpe": "wpe",
        **{f"[transformer.]h.*.{norm}": f"{layer}/{norm}" for norm in ("ln_1", "ln_2")},
        **{f"[transformer.]h.*.{theirs}.weight": f"{layer}/{ours}/kernel" for theirs, ours in dense},
        **{f"[transformer.]h.*.{theirs}.bias": f"{layer}/{ours}/bias" for theirs, ours in dense},
        "[transformer.]ln_f": "ln_f",
        **({"lm_head.weight": "wte/embedding"} if config.tie_word_embeddings else {"lm_head": "lm_head"}),
        **{f"[transformer.]h.*.attn.{mask}": None for mask in ("bias", "masked_bias")},
    }


def transformer_1b3_step(batch: int) -> tuple[GPT2, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """What a training step of the 1.3-billion-parameter model takes: the model, tokens [batch, 2048], next tokens [batch, 2048].

    Its layers are written out one by one and checkpointed, which a chip with 32 GiB needs from the second sequence on.
    """
    return _step(dataclasses.replace(GPT3_XL, remat=True), batch)


def transformer_1b3_scan_step(batch: int) -> tuple[GPT2, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """The same with its layers in a scan."""
    return _step(dataclasses.replace(GPT3_XL, remat=True, scan=True), batch)


def transformer_1b3_kept_step(batch: int) -> tuple[GPT2, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """The same with layers written out one by one whose activations are all kept for the backward pass."""
    return _step(GPT3_XL, batch)


def _step(config: Config, batch: int) -> tuple[GPT2, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    tokens = jax.ShapeDtypeStruct((batch, config.n_positions), jnp.int32)
    return GPT2(config), (tokens, tokens)
