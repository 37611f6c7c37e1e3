"""The text encoder of CLIP (Radford et al., 2021) under the names of transformers' CLIPTextModel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from flax import linen as nn

from .attention import Context, attend, causal
from .configs import JsonConfig, indivisible
from .layers import run_layers


@dataclass(frozen=True)
class Config(JsonConfig):
    """CLIPTextModel's `config.json`."""

    MODEL_TYPE: ClassVar[str] = "clip_text_model"
    ARCHITECTURE: ClassVar[str] = "CLIPTextModel"
    ACTIVATION: ClassVar[str] = "hidden_act"

    vocab_size: int = 49408
    hidden_size: int = 512
    intermediate_size: int = 2048
    projection_dim: int | None = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    max_position_embeddings: int = 77
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    initializer_factor: float = 1.0
    pad_token_id: int | None = 1
    bos_token_id: int | None = 49406
    eos_token_id: int | None = 49407

    def conflicts(self) -> list[str]:
        """A head has hidden_size / num_attention_heads."""
        return indivisible("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)


OPEN_CLIP = Config(hidden_size=1024, intermediate_size=4096, num_hidden_layers=23, num_attention_heads=16, hidden_act="gelu")
SIZES: Mapping[str, Config] = {
    "CompVis/stable-diffusion-v1-4": Config(hidden_size=768, intermediate_size=3072, num_attention_heads=12, projection_dim=768),
    "stabilityai/stable-diffusion-2-base": OPEN_CLIP,
    "stabilityai/stable-diffusion-2-1": OPEN_CLIP,
}
"""The pipeline's name -> configuration: 123 million parameters, and 340 of both others."""

TINY = Config(
    vocab_size=99, hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=12,
    bos_token_id=97, eos_token_id=98,
)  # fmt: skip
"""For tests."""


class SelfAttention(nn.Module):
    """Causal self-attention: [B, T, D] -> [B, T, D]."""

    config: Config
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """Return each token's mixture of itself and those before it."""
        config, (batch, length, width) = self.config, x.shape
        heads = config.num_attention_heads
        q, k, v = (nn.Dense(width, name=f"{name}_proj")(x).reshape(batch, length, heads, width // heads) for name in "qkv")
        dropout = nn.Dropout(config.attention_dropout, deterministic=not self.train)
        return nn.Dense(width, name="out_proj")(attend(q, k, v, context.visible, dropout))


class Feedforward(nn.Module):
    """Two dense layers with an activation between them: [..., D] -> [..., D]."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the second layer's outputs."""
        inner = self.config.activation(nn.Dense(self.config.intermediate_size, name="fc1")(x))
        return nn.Dense(x.shape[-1], name="fc2")(inner)


class Layer(nn.Module):
    """Attention and feedforward, each normalised before and added to what it came from: [B, T, D] -> [B, T, D]."""

    config: Config
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, context: Context, cache: Any) -> tuple[jax.Array, Any]:
        """Return y = x + attention(norm(x)) plus feedforward(norm(y)); there is no cache."""
        config, attention = self.config, SelfAttention(self.config, self.train, name="self_attn")
        x = x + attention(_norm(config, "layer_norm1")(x), context)
        return x + Feedforward(config, name="mlp")(_norm(config, "layer_norm2")(x)), (None, None)


class CLIPTextModel(nn.Module):
    """Tokens [B, T] of integers -> what each means after those before it [B, T, D], T at most `config.max_position_embeddings`."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        """Return the last layer's results, normalised."""
        config, length = self.config, tokens.shape[1]
        if length > config.max_position_embeddings:
            raise ValueError(f"tokens: {length} in a row, expected at most {config.max_position_embeddings}, for which there are positions")
        initial = nn.initializers.normal(config.initializer_range)
        words = nn.Embed(config.vocab_size, config.hidden_size, embedding_init=initial, name="token_embedding")
        places = nn.Embed(config.max_position_embeddings, config.hidden_size, embedding_init=initial, name="position_embedding")
        x = words(tokens) + places.embedding[:length]  # -> [B, T, D]
        context = Context(causal(length, None))
        x, _, _ = run_layers(Layer, config, config.num_hidden_layers, "layers", x, context, None, train=train)
        return _norm(config, "final_layer_norm")(x)


def _norm(config: Config, name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=config.layer_norm_eps, name=name)


def torch_layers(config: Config) -> dict[str, str | None]:
    """Names in transformers' state dict -> places in the Flax parameters, as `tpuflow.importers.flax_params` and `state_dict` take them."""
    layer = "layers" if config.scan else "layers_*"
    parts = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.out_proj",
        "layer_norm1",
        "layer_norm2",
        "mlp.fc1",
        "mlp.fc2",
    )
    return {
        **{f"[text_model.]embeddings.{name}": name for name in ("token_embedding", "position_embedding")},
        **{f"[text_model.]encoder.layers.*.{part}": f"{layer}/{part.replace('.', '/')}" for part in parts},
        "[text_model.]final_layer_norm": "final_layer_norm",
        "[text_model.]embeddings.position_ids": None,
    }
