"""Llama (Touvron et al., 2023) under the names of transformers' LlamaForCausalLM: rotary positions, RMSNorm, grouped queries, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Self

import jax
from flax import linen as nn
from jax import numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .attention import Context, attend, remember
from .causal import CausalModel, Inputs
from .configs import JsonConfig, indivisible
from .layers import embedded, run_layers, words


@dataclass(frozen=True)
class RotaryConfig(JsonConfig):
    """What Llama's and Mixtral's `config.json` have in common. `num_key_value_heads` None: as many as heads; `head_dim` None: their share.

    `rope_theta` is the base of the rotary positions' wavelengths, which newer files have among the `rope_parameters`.
    """

    ACTIVATION: ClassVar[str] = "hidden_act"

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: float = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Self:
        """As `JsonConfig.from_json`; of the rotary positions only the plain ones, without scaling, are computed.

        Raises:
          ValueError: it is of another kind of model, or asks for something that is not computed here.
        """
        rope = {**(json.get("rope_scaling") or {}), **(json.get("rope_parameters") or {})}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"config.json of a {cls.MODEL_TYPE} model: rope_type is {kind!r}, only 'default' is computed")
        theta = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
        return super().from_json({**json, **theta})

    def to_json(self) -> dict[str, Any]:
        """As `JsonConfig.to_json`."""
        return {**super().to_json(), "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta}}

    def conflicts(self) -> list[str]:
        """A head has hidden_size / num_attention_heads unless `head_dim` says it; as many of them share each key."""
        found = indivisible("num_attention_heads", self.num_attention_heads, "num_key_value_heads", self.key_heads)
        if self.head_dim is None:
            found += indivisible("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        return found or indivisible("the width of a head", self.head_width, "rotary positions", 2)

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        """The width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, heads of keys and values, their width."""
        return self.num_hidden_layers, self.key_heads, self.head_width

    @property
    def position_limit(self) -> int | None:
        """Rotary positions go on."""
        return None


@dataclass(frozen=True)
class Config(RotaryConfig):
    """Llama's `config.json`."""

    MODEL_TYPE: ClassVar[str] = "llama"
    ARCHITECTURE: ClassVar[str] = "LlamaForCausalLM"
    ONLY: ClassVar[Mapping[str, Any]] = MappingProxyType({"pretraining_tp": 1})

    mlp_bias: bool = False


SIZES: Mapping[str, Config] = {
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": Config(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_key_value_heads=4, rms_norm_eps=1e-5
    ),
    "meta-llama/Llama-2-7b-hf": Config(max_position_embeddings=4096, rms_norm_eps=1e-5),
    "meta-llama/Llama-2-13b-hf": Config(
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    ),
    "meta-llama/Meta-Llama-3-8B": Config(
        vocab_size=128256,
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        bos_token_id=128000,
        eos_token_id=128001,
    ),
}
"""transformers' name -> configuration."""

TINY = Config(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    eos_token_id=None,
)
"""For tests."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon), computed in fp32, times a scale: [..., D] -> [..., D]."""

    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the normalised features, in the type of x."""
        wide = x.astype(jnp.float32)
        normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return self.param("scale", nn.initializers.ones, (x.shape[-1],)) * normal.astype(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions, of which several queries share a key and a value: [B, T, D] -> [B, T, D].

    Queries, keys, values and the result have the names of their layers for policies of `jax.checkpoint`; what is mixed is "context".
    """

    config: RotaryConfig
    train: bool
    bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, context: Context, cache: Any) -> tuple[jax.Array, Any]:
        """Return each position's mixture of itself and those before it, and the keys and values that are kept."""
        config, width = self.config, self.config.head_width
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.key_heads, "v_proj": config.key_heads}
        q, k, v = (
            dense(config, count * width, name, bias=self.bias)(x).reshape(*x.shape[:2], count, width)  # [B, T, D] -> [B, T, heads, width]
            for name, count in heads.items()
        )
        assert context.rotation is not None, "the model computes it"
        q, k = rotated(q, *context.rotation), rotated(k, *context.rotation)
        q, k, v = map(checkpoint_name, (q, k, v), heads)
        k, v, kept = remember(cache, k, v, context)
        dropout = nn.Dropout(config.attention_dropout, deterministic=not self.train)
        mixed = checkpoint_name(attend(q, k, v, context.visible, dropout), "context")
        return checkpoint_name(dense(config, config.hidden_size, "o_proj", bias=self.bias)(mixed), "o_proj"), kept


class Feedforward(nn.Module):
    """down(activation(gate(x)) * up(x)): [..., D] -> [..., D], named for policies of `jax.checkpoint` as its last layer."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the last layer's outputs."""
        config = self.config
        gate, up = (dense(config, config.intermediate_size, name, bias=config.mlp_bias)(x) for name in ("gate_proj", "up_proj"))
        down = dense(config, config.hidden_size, "down_proj", bias=config.mlp_bias)(config.activation(gate) * up)
        return checkpoint_name(down, "down_proj")


class RotaryLayer(nn.Module):
    """Attention and what follows it, each normalised before and added to what it came from: [B, T, D] -> [B, T, D]."""

    config: RotaryConfig
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, context: Context, cache: Any) -> tuple[jax.Array, Any]:
        """Return y = x + attention(norm(x)) plus feedforward(norm(y)); the keys and values that are kept, and what there is to note."""
        config = self.config
        attention = Attention(config, self.train, config.attention_bias, name="self_attn")
        mixed, kept = attention(RMSNorm(config.rms_norm_eps, name="input_layernorm")(x), context, cache)
        x = x + mixed
        y, noted = self.feedforward(RMSNorm(config.rms_norm_eps, name="post_attention_layernorm")(x))
        return x + y, (kept, noted)

    def feedforward(self, x: jax.Array) -> tuple[jax.Array, Any]:
        """What follows attention, as "mlp", and what of it is noted."""
        raise NotImplementedError(f"{type(self).__name__}.feedforward")


class Layer(RotaryLayer):
    """Attention and feedforward, each normalised before and added to what it came from: [B, T, D] -> [B, T, D]."""

    config: Config

    def feedforward(self, x: jax.Array) -> tuple[jax.Array, Any]:
        """Two dense layers, gated; nothing is noted."""
        return Feedforward(self.config, name="mlp")(x), None


class Llama(CausalModel):
    """A language model: tokens [B, T] of integers -> logits [B, T, vocabulary] of each next token."""

    config: RotaryConfig

    layer = Layer

    @nn.compact
    def run(self, inputs: Inputs) -> tuple[jax.Array, Any]:
        """As `CausalModel.run` says."""
        config, tokens = self.config, inputs.tokens
        initial = nn.initializers.normal(config.initializer_range)
        embed = words(config.vocab_size, config.hidden_size, config.pad_token_id, config.initializer_range, "embed_tokens")
        x = embedded(embed, tokens, config.pad_token_id)
        places = jnp.arange(tokens.shape[1])[None] if inputs.positions is None else inputs.positions
        context = inputs.context._replace(rotation=rotation(places, config.head_width, config.rope_theta))
        x, kept, noted = self.run_layers(x, context, inputs)
        self.note(noted, inputs.attention_mask)
        x = RMSNorm(config.rms_norm_eps, name="norm")(x[:, -1:] if inputs.last else x)
        if config.tie_word_embeddings:
            return embed.attend(x), kept
        return nn.Dense(config.vocab_size, use_bias=False, kernel_init=initial, name="lm_head")(x), kept

    def run_layers(self, x: jax.Array, context: Context, inputs: Inputs) -> tuple[jax.Array, Any, Any]:
        """(x after all layers, their caches, what each noted, stacked)."""
        config = self.config
        return run_layers(self.layer, config, config.num_hidden_layers, "layers", x, context, inputs.cache, train=inputs.train)

    def note(self, noted: Any, attention_mask: jax.Array | None) -> None:
        """Take what the layers noted beside their results, stacked; nothing here."""


def dense(config: RotaryConfig, width: int, name: str, *, bias: bool) -> nn.Dense:
    """A dense layer with the original's initial weights."""
    return nn.Dense(width, use_bias=bias, kernel_init=nn.initializers.normal(config.initializer_range), name=name)


def rotation(positions: jax.Array, width: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """The cosines and sines [B, T, 1, width / 2] by which positions [B, T] are turned: pair i by position / theta^(2i / width)."""
    frequencies = jnp.asarray([theta ** (-i / width) for i in range(0, width, 2)], jnp.float32)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotated(x: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """Turn the pairs of features of x [B, T, H, D], which are those D / 2 apart."""
    first, second = jnp.split(x, 2, axis=-1)
    cosines, sines = cosines.astype(x.dtype), sines.astype(x.dtype)
    return jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)


def torch_layers(config: Config) -> dict[str, str | None]:
    """Names in transformers' state dict -> places in the Flax parameters, as `tpuflow.importers.flax_params` and `state_dict` take them."""
    mlp = {f"[model.]layers.*.mlp.{name}": f"{layers_of(config)}/mlp/{name}" for name in ("gate_proj", "up_proj", "down_proj")}
    return {**shared_torch_layers(config), **mlp}


def layers_of(config: RotaryConfig) -> str:
    """What a layer is called."""
    return "layers" if config.scan else "layers_*"


def shared_torch_layers(config: RotaryConfig) -> dict[str, str | None]:
    """The rows of `torch_layers` that Llama and Mixtral have in common."""
    layer = layers_of(config)
    attention = {f"[model.]layers.*.self_attn.{name}_proj": f"{layer}/self_attn/{name}_proj" for name in "qkvo"}
    norms = {f"[model.]layers.*.{name}": f"{layer}/{name}" for name in ("input_layernorm", "post_attention_layernorm")}
    head = {"lm_head.weight": "embed_tokens/embedding"} if config.tie_word_embeddings else {"lm_head": "lm_head"}
    ignored = dict.fromkeys(("[model.]rotary_emb.inv_freq", "[model.]layers.*.self_attn.rotary_emb.inv_freq"))
    return {"[model.]embed_tokens": "embed_tokens", **attention, **norms, "[model.]norm": "norm", **head, **ignored}
