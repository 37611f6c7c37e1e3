"""AutoencoderKL: images to latents and back (Kingma and Welling, 2014; Rombach et al., 2022), under diffusers' names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
from flax import linen as nn
from jax import numpy as jnp

from . import diffusers_configs
from .diffusers_configs import DiffusersConfig
from .diffusion_blocks import BELOW, Downsample2D, ResnetBlock2D, Upsample2D, checkpointed, conv, group_norm, mixed

EPSILON = 1e-6
LOGARITHMS = (-30.0, 20.0)
"""Bounds of the logarithm of a latent's variance."""


@dataclass(frozen=True)
class Config(DiffusersConfig):
    """AutoencoderKL's `config.json`. Latents times `scaling_factor` have a variance of about 1."""

    ARCHITECTURE: ClassVar[str] = "AutoencoderKL"
    BLOCKS: ClassVar[Mapping[str, Collection[str]]] = MappingProxyType(
        {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
    )
    ONLY: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            "shift_factor": None,
            "latents_mean": None,
            "latents_std": None,
            "use_quant_conv": True,
            "use_post_quant_conv": True,
            "mid_block_add_attention": True,
        }
    )

    in_channels: int = 3
    out_channels: int = 3
    down_block_types: tuple[str, ...] = ("DownEncoderBlock2D",)
    up_block_types: tuple[str, ...] = ("UpDecoderBlock2D",)
    block_out_channels: tuple[int, ...] = (64,)
    latent_channels: int = 4
    sample_size: int = 32
    scaling_factor: float = 0.18215

    @property
    def reduction(self) -> int:
        """How many pixels of an image's side become one of its latents'."""
        return 2 ** (len(self.block_out_channels) - 1)


class Latents(NamedTuple):
    """The normal distribution of an image's latents: [B, H / f, W / f, L] each, for a reduction of f."""

    mean: jax.Array
    log_variance: jax.Array

    def drawn(self, noise: jax.Array) -> jax.Array:
        """Latents for standard normal noise of their shape."""
        return self.mean + jnp.exp(0.5 * self.log_variance) * noise


class Attention(nn.Module):
    """One head of attention between the pixels of an image, added to it: [B, H, W, C] -> [B, H, W, C]."""

    groups: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the sum."""
        pixels = group_norm(self.groups, EPSILON, "group_norm")(x).reshape(x.shape[0], -1, x.shape[-1])
        return x + mixed(pixels, pixels, 1, bias=True).reshape(x.shape)


class MidBlock(nn.Module):
    """A residual block, attention, and a residual block: [B, H, W, C] -> [B, H, W, C]."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the last block's results."""
        x = _resnet(self.config, x.shape[-1], 0)(x)
        x = checkpointed(Attention, self.config)(self.config.norm_num_groups, name="attentions_0")(x)
        return _resnet(self.config, x.shape[-1], 1)(x)


class DownBlock(nn.Module):
    """Residual blocks and, if `halved`, a smaller image: [B, H, W, C] -> [B, H / 2, W / 2, width]."""

    config: Config
    width: int
    halved: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the last layer's results."""
        for index in range(self.config.layers_per_block):
            x = _resnet(self.config, self.width, index)(x)
        return Downsample2D(BELOW, name="downsamplers_0")(x) if self.halved else x


class UpBlock(nn.Module):
    """Residual blocks and, if `doubled`, a larger image: [B, H, W, C] -> [B, 2 H, 2 W, width]."""

    config: Config
    width: int
    doubled: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the last layer's results."""
        for index in range(self.config.layers_per_block + 1):
            x = _resnet(self.config, self.width, index)(x)
        return Upsample2D(name="upsamplers_0")(x) if self.doubled else x


class Encoder(nn.Module):
    """Images [B, H, W, C] -> twice the latents' channels [B, H / f, W / f, 2 L], for a reduction of f."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return what means and variances are made of."""
        config, last = self.config, len(self.config.block_out_channels) - 1
        x = conv(config.block_out_channels[0], "conv_in")(x)
        for index, width in enumerate(config.block_out_channels):
            x = DownBlock(config, width, index < last, name=f"down_blocks_{index}")(x)
        return _out(config, 2 * config.latent_channels, MidBlock(config, name="mid_block")(x))


class Decoder(nn.Module):
    """Latents [B, H / f, W / f, L] -> images [B, H, W, C], for a reduction of f."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the images."""
        config, last = self.config, len(self.config.block_out_channels) - 1
        x = MidBlock(config, name="mid_block")(conv(config.block_out_channels[-1], "conv_in")(x))
        for index, width in enumerate(reversed(config.block_out_channels)):
            x = UpBlock(config, width, index < last, name=f"up_blocks_{index}")(x)
        return _out(config, config.out_channels, x)


class AutoencoderKL(nn.Module):
    """Images [B, H, W, C] in -1 to 1 <-> latents [B, H / f, W / f, L], for a reduction of f (8 in Stable Diffusion)."""

    config: Config

    def setup(self) -> None:
        """Make the four parts, which diffusers has under these names."""
        self.encoder = Encoder(self.config)
        self.decoder = Decoder(self.config)
        self.quant_conv = nn.Conv(2 * self.config.latent_channels, (1, 1))
        self.post_quant_conv = nn.Conv(self.config.latent_channels, (1, 1))

    def encode(self, images: jax.Array) -> Latents:
        """The distribution of the images' latents, not yet scaled."""
        height, width = images.shape[1:3]
        if height % self.config.reduction or width % self.config.reduction:
            raise ValueError(f"images of {height}x{width}: expected multiples of {self.config.reduction} pixels, which become one latent")
        mean, logarithm = jnp.split(self.quant_conv(self.encoder(images)), 2, axis=-1)
        return Latents(mean, jnp.clip(logarithm, *LOGARITHMS))

    def decode(self, latents: jax.Array) -> jax.Array:
        """The images of latents, which are not scaled any more."""
        return self.decoder(self.post_quant_conv(latents))

    def __call__(self, images: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        """Images encoded and decoded, by way of latents drawn with this noise, or of the likeliest ones."""
        latents = self.encode(images)
        return self.decode(latents.mean if noise is None else latents.drawn(noise))


def _resnet(config: Config, width: int, index: int) -> nn.Module:
    kind = checkpointed(ResnetBlock2D, config)
    return kind(width, config.norm_num_groups, EPSILON, config.act_fn, name=f"resnets_{index}")


def _out(config: Config, width: int, x: jax.Array) -> jax.Array:
    """The last three layers of either half; their activation is the same whatever the file says."""
    return conv(width, "conv_out")(nn.silu(group_norm(config.norm_num_groups, EPSILON, "conv_norm_out")(x)))


OLD_NAMES: Mapping[str, str] = {
    "to_q": "{to_q|query}",
    "to_k": "{to_k|key}",
    "to_v": "{to_v|value}",
    "to_out.*": "{to_out.*|proj_attn}",
}
"""Layers of the attention -> what they are called in files, the older ones' names last."""


def torch_layers(variables: Mapping[str, Any]) -> dict[str, str]:
    """Names in diffusers' state dict -> places in the Flax parameters, as `tpuflow.importers.flax_params` and `state_dict` take them."""
    return {_with_old_names(name): place for name, place in diffusers_configs.torch_layers(variables).items()}


def _with_old_names(name: str) -> str:
    for new, both in OLD_NAMES.items():
        if name.endswith(f".{new}"):
            return name.removesuffix(new) + both
    return name
