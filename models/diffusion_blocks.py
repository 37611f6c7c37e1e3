"""Blocks that the UNet and the autoencoder of latent diffusion share, as diffusers has them; images are [B, H, W, C]."""

from __future__ import annotations

from typing import TypeVar

import jax
from flax import linen as nn
from jax import numpy as jnp

from .attention import attend_in_blocks
from .configs import ACTIVATIONS
from .diffusers_configs import DiffusersConfig

M = TypeVar("M", bound=nn.Module)

AROUND = ((1, 1), (1, 1))
"""Padding of a 3x3 window: one pixel on every side."""
BELOW = ((0, 1), (0, 1))
"""One pixel below and at the right only, where the autoencoder halves its images."""

LORA_DOWN, LORA_UP = "_lora_down", "_lora_up"
"""What the names of a layer's two low-rank matrices end in."""


def group_norm(groups: int, epsilon: float, name: str) -> nn.GroupNorm:
    """Normalisation of groups of channels over the image; the variance is that of differences from the mean, which does not cancel."""
    return nn.GroupNorm(groups, epsilon=epsilon, use_fast_variance=False, name=name)


def conv(width: int, name: str) -> nn.Conv:
    """A 3x3 convolution that keeps the image's size."""
    return nn.Conv(width, (3, 3), padding=AROUND, name=name)


def checkpointed(kind: type[M], config: DiffusersConfig) -> type[M]:
    """The module, whose inner values are computed again in the backward pass if the configuration says so."""
    return nn.remat(kind) if config.gradient_checkpointing else kind


class ResnetBlock2D(nn.Module):
    """Two normalised convolutions added to what they came from: [B, H, W, C] -> [B, H, W, width]."""

    width: int
    groups: int
    epsilon: float
    act_fn: str

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array | None = None) -> jax.Array:
        """Return the sum; `time` [B, E], the embedding of the timestep, is added between the convolutions."""
        activation = ACTIVATIONS[self.act_fn]
        y = conv(self.width, "conv1")(activation(group_norm(self.groups, self.epsilon, "norm1")(x)))
        if time is not None:
            y = y + nn.Dense(self.width, name="time_emb_proj")(activation(time))[:, None, None]
        y = conv(self.width, "conv2")(activation(group_norm(self.groups, self.epsilon, "norm2")(y)))
        return y + (x if x.shape[-1] == self.width else nn.Conv(self.width, (1, 1), name="conv_shortcut")(x))


class Downsample2D(nn.Module):
    """A convolution that halves the image: [B, H, W, C] -> [B, H / 2, W / 2, C]."""

    padding: tuple[tuple[int, int], tuple[int, int]] = AROUND

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return every second result of the convolution."""
        return nn.Conv(x.shape[-1], (3, 3), strides=2, padding=self.padding, name="conv")(x)


class Upsample2D(nn.Module):
    """Every pixel four times, and a convolution: [B, H, W, C] -> [B, 2 H, 2 W, C]."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the image of twice the size."""
        batch, height, width, channels = x.shape
        four = jnp.broadcast_to(x[:, :, None, :, None], (batch, height, 2, width, 2, channels))
        return conv(channels, "conv")(four.reshape(batch, 2 * height, 2 * width, channels))


def mixed(
    x: jax.Array, context: jax.Array, heads: int, *, bias: bool = False, upcast: bool = False, lora_rank: int | None = None
) -> jax.Array:
    """Attention of tokens to a context, their own or another one, in a module's compact method: [B, T, D], [B, S, E] -> [B, T, D].

    bias: whether queries, keys and values have one. upcast: scores and their softmax in fp32. lora_rank: as `projected`.
    """
    width = x.shape[-1]
    q, k, v = (
        projected(source, width, name, bias=bias, lora_rank=lora_rank).reshape(*source.shape[:2], heads, width // heads)
        for name, source in (("to_q", x), ("to_k", context), ("to_v", context))
    )  # [B, T, D] -> [B, T, H, D / H]
    wide = (q.astype(jnp.float32), k.astype(jnp.float32)) if upcast else (q, k)
    return projected(attend_in_blocks(*wide, v).astype(x.dtype), width, "to_out_0", bias=True, lora_rank=lora_rank)


def projected(x: jax.Array, width: int, name: str, *, bias: bool, lora_rank: int | None) -> jax.Array:
    """A dense layer, in a module's compact method: [..., D] -> [..., width].

    lora_rank: if given, the product of two matrices of that rank is added to the layer's (Hu et al., 2021): at first nothing, since the
    second is zero. The first is drawn with a deviation of 1 / rank, and the sum has no further scale, as diffusers' examples have it.
    """
    y = nn.Dense(width, use_bias=bias, name=name)(x)
    if lora_rank is None:
        return y
    narrow = nn.Dense(lora_rank, use_bias=False, kernel_init=nn.initializers.normal(1 / lora_rank), name=f"{name}{LORA_DOWN}")(x)
    return y + nn.Dense(width, use_bias=False, kernel_init=nn.initializers.zeros, name=f"{name}{LORA_UP}")(narrow)


class Attention(nn.Module):
    """Attention of the image's pixels to a context: [B, T, D], [B, S, E] -> [B, T, D]."""

    heads: int
    upcast: bool
    lora_rank: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array, context: jax.Array) -> jax.Array:
        """Return the mixture that each pixel finds."""
        return mixed(x, context, self.heads, upcast=self.upcast, lora_rank=self.lora_rank)


class FeedForward(nn.Module):
    """Gated by GELU (Shazeer, 2020): [..., D] -> [..., D] by way of 4 D."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the last layer's outputs."""
        width = x.shape[-1]
        values, gate = jnp.split(nn.Dense(8 * width, name="net_0_proj")(x), 2, axis=-1)
        return nn.Dense(width, name="net_2")(values * nn.gelu(gate, approximate=False))


class BasicTransformerBlock(nn.Module):
    """Attention to the image, to the text, and a feedforward layer, each normalised before and added: [B, T, D] -> [B, T, D]."""

    heads: int
    upcast: bool
    lora_rank: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array, text: jax.Array) -> jax.Array:
        """Return the sum; text [B, S, E]."""
        normal = nn.LayerNorm(epsilon=1e-5, name="norm1")(x)
        x = x + Attention(self.heads, self.upcast, self.lora_rank, name="attn1")(normal, normal)
        x = x + Attention(self.heads, self.upcast, self.lora_rank, name="attn2")(nn.LayerNorm(epsilon=1e-5, name="norm2")(x), text)
        return x + FeedForward(name="ff")(nn.LayerNorm(epsilon=1e-5, name="norm3")(x))


class Transformer2DModel(nn.Module):
    """A transformer block over the pixels of an image, added to it: [B, H, W, C] -> [B, H, W, C].

    linear: whether the projections before and after it are dense layers, or convolutions with a window of one pixel: the same but for the
    shape of their kernels.
    """

    heads: int
    groups: int
    linear: bool
    upcast: bool
    lora_rank: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array, text: jax.Array) -> jax.Array:
        """Return the sum; text [B, S, E]."""
        batch, height, width, channels = x.shape
        y = self._projection("proj_in", channels)(group_norm(self.groups, 1e-6, "norm")(x))
        y = y.reshape(batch, height * width, channels)
        y = BasicTransformerBlock(self.heads, self.upcast, self.lora_rank, name="transformer_blocks_0")(y, text)
        return x + self._projection("proj_out", channels)(y.reshape(x.shape))

    def _projection(self, name: str, width: int) -> nn.Module:
        return nn.Dense(width, name=name) if self.linear else nn.Conv(width, (1, 1), name=name)
