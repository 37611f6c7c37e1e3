"""UNet2DConditionModel: the noise in latents, for a timestep and a text (Rombach et al., 2022), under diffusers' names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import jax
from flax import linen as nn
from jax import numpy as jnp

from .configs import ACTIVATIONS, indivisible
from .diffusers_configs import DiffusersConfig, torch_layers
from .diffusion_blocks import (
    AROUND,
    BELOW,
    Downsample2D,
    ResnetBlock2D,
    Transformer2DModel,
    Upsample2D,
    checkpointed,
    conv,
    group_norm,
)  # fmt: skip

__all__ = ["SIZES", "TINY", "Config", "UNet2DConditionModel", "torch_layers"]

LONGEST_PERIOD = 10000.0
"""Of the waves that timesteps are embedded by."""

PADDINGS = {0: BELOW, 1: AROUND}


@dataclass(frozen=True)
class Config(DiffusersConfig):
    """UNet2DConditionModel's `config.json`: those of Stable Diffusion 1.x and 2.x.

    `attention_head_dim` is the number of heads, of all blocks or of each on the way down: a name that diffusers keeps since files have it.
    `lora_rank`, which is not in the file, is that of what is added to the projections of attention; None for nothing.
    """

    ARCHITECTURE: ClassVar[str] = "UNet2DConditionModel"
    OURS: ClassVar[tuple[str, ...]] = (*DiffusersConfig.OURS, "lora_rank")
    BLOCKS: ClassVar[Mapping[str, Collection[str]]] = MappingProxyType(
        {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
    )
    ONLY: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            "center_input_sample": False,
            "mid_block_type": "UNetMidBlock2DCrossAttn",
            "only_cross_attention": False,
            "mid_block_only_cross_attention": None,
            "mid_block_scale_factor": 1,
            "dropout": 0.0,
            "transformer_layers_per_block": 1,
            "reverse_transformer_layers_per_block": None,
            "encoder_hid_dim": None,
            "encoder_hid_dim_type": None,
            "num_attention_heads": None,
            "dual_cross_attention": False,
            "class_embed_type": None,
            "addition_embed_type": None,
            "num_class_embeds": None,
            "resnet_time_scale_shift": "default",
            "resnet_skip_time_act": False,
            "resnet_out_scale_factor": 1.0,
            "time_embedding_type": "positional",
            "time_embedding_dim": None,
            "time_embedding_act_fn": None,
            "timestep_post_act": None,
            "time_cond_proj_dim": None,
            "conv_in_kernel": 3,
            "conv_out_kernel": 3,
            "attention_type": "default",
            "class_embeddings_concat": False,
            "cross_attention_norm": None,
        }
    )

    sample_size: int | None = None
    in_channels: int = 4
    out_channels: int = 4
    flip_sin_to_cos: bool = True
    freq_shift: float = 0
    down_block_types: tuple[str, ...] = ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D")
    up_block_types: tuple[str, ...] = ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D")
    block_out_channels: tuple[int, ...] = (320, 640, 1280, 1280)
    layers_per_block: int = 2
    downsample_padding: float = 1
    norm_eps: float = 1e-5
    cross_attention_dim: int = 1280
    attention_head_dim: int | tuple[int, ...] = 8
    use_linear_projection: bool = False
    upcast_attention: bool = False
    lora_rank: int | None = None

    def conflicts(self) -> list[str]:
        """As `DiffusersConfig.conflicts`; heads divide each width."""
        found = super().conflicts()
        if self.downsample_padding not in PADDINGS:
            found.append(f"downsample_padding is {self.downsample_padding}, expected {' or '.join(map(str, PADDINGS))}")
        if len(self.heads) != len(self.block_out_channels) or min(self.heads) < 1:
            return [*found, f"attention_head_dim is {self.attention_head_dim}, expected a number from 1 on, or one for each block"]
        for width, heads in zip(self.block_out_channels, self.heads, strict=True):
            found += indivisible("a width in block_out_channels", width, "its number of heads", heads)
        return found + indivisible("the first width in block_out_channels", self.block_out_channels[0], "sines and cosines", 2)

    @property
    def heads(self) -> tuple[int, ...]:
        """Heads of attention of each block on the way down."""
        given = self.attention_head_dim
        return given if isinstance(given, tuple) else (given,) * len(self.block_out_channels)

    @property
    def reduction(self) -> int:
        """How many latents of a side become one at the bottom."""
        return 2 ** (len(self.block_out_channels) - 1)


SIZES: Mapping[str, Config] = {
    "CompVis/stable-diffusion-v1-4": Config(sample_size=64, cross_attention_dim=768),
    "stabilityai/stable-diffusion-2-base": Config(
        sample_size=64, cross_attention_dim=1024, attention_head_dim=(5, 10, 20, 20), use_linear_projection=True
    ),
    "stabilityai/stable-diffusion-2-1": Config(
        sample_size=96, cross_attention_dim=1024, attention_head_dim=(5, 10, 20, 20), use_linear_projection=True, upcast_attention=True
    ),
}
"""The pipeline's name -> configuration: 860 and twice 866 million parameters."""

TINY = Config(
    sample_size=8,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    block_out_channels=(16, 32),
    layers_per_block=1,
    norm_num_groups=8,
    cross_attention_dim=24,
    attention_head_dim=4,
)
"""For tests."""


@dataclass(frozen=True)
class Level:
    """What a block is, down or up: the width of its results, heads of attention (None: without), layers, whether the size changes."""

    config: Config
    width: int
    heads: int | None
    layers: int
    resized: bool

    def layer(self, index: int, x: jax.Array, time: jax.Array, text: jax.Array) -> jax.Array:
        """One residual block with its attention, in a module's compact method."""
        config = self.config
        resnet = checkpointed(ResnetBlock2D, config)
        x = resnet(self.width, config.norm_num_groups, config.norm_eps, config.act_fn, name=f"resnets_{index}")(x, time)
        return x if self.heads is None else attention(config, self.heads, index)(x, text)


class DownBlock(nn.Module):
    """Layers on the way down: [B, H, W, C] -> [B, H / 2, W / 2, width], and the results of each for the way up."""

    level: Level

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array, text: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Return the last results, and all."""
        level, kept = self.level, []
        for index in range(level.layers):
            x = level.layer(index, x, time, text)
            kept.append(x)
        if level.resized:
            x = Downsample2D(PADDINGS[int(level.config.downsample_padding)], name="downsamplers_0")(x)
            kept.append(x)
        return x, tuple(kept)


class MidBlock(nn.Module):
    """A residual block, attention, and a residual block at the bottom: [B, H, W, C] -> [B, H, W, C]."""

    level: Level

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array, text: jax.Array) -> jax.Array:
        """Return the last block's results."""
        x = self.level.layer(0, x, time, text)
        return dataclasses.replace(self.level, heads=None).layer(1, x, time, text)


class UpBlock(nn.Module):
    """Layers on the way up, each with what the way down kept: [B, H, W, C] -> [B, 2 H, 2 W, width]."""

    level: Level

    @nn.compact
    def __call__(self, x: jax.Array, kept: tuple[jax.Array, ...], time: jax.Array, text: jax.Array) -> jax.Array:
        """Return the last results; the last of what was kept is used first."""
        for index, skipped in enumerate(reversed(kept)):
            x = self.level.layer(index, jnp.concatenate([x, skipped], axis=-1), time, text)
        return Upsample2D(name="upsamplers_0")(x) if self.level.resized else x


class TimestepEmbedding(nn.Module):
    """Two dense layers: [B, C] -> [B, width]."""

    width: int
    act_fn: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the second layer's outputs."""
        return nn.Dense(self.width, name="linear_2")(ACTIVATIONS[self.act_fn](nn.Dense(self.width, name="linear_1")(x)))


class UNet2DConditionModel(nn.Module):
    """Latents [B, H, W, in] with noise -> the noise (or what else is predicted) [B, H, W, out]."""

    config: Config

    @nn.compact
    def __call__(self, sample: jax.Array, timesteps: jax.Array, encoder_hidden_states: jax.Array) -> jax.Array:
        """Return the prediction; timesteps: [B] or a scalar; encoder_hidden_states: [B, S, cross_attention_dim], the text."""
        config, text = self.config, encoder_hidden_states
        self._check(sample, text)
        waves = timestep_waves(config, jnp.broadcast_to(timesteps, sample.shape[:1])).astype(sample.dtype)
        time = TimestepEmbedding(4 * config.block_out_channels[0], config.act_fn, name="time_embedding")(waves)
        x = conv(config.block_out_channels[0], "conv_in")(sample)
        kept = [x]
        for index, level in enumerate(down_levels(config)):
            x, results = DownBlock(level, name=f"down_blocks_{index}")(x, time, text)
            kept += results
        bottom = Level(config, config.block_out_channels[-1], config.heads[-1], 2, resized=False)
        x = MidBlock(bottom, name="mid_block")(x, time, text)
        for index, level in enumerate(up_levels(config)):
            kept, taken = kept[: -level.layers], kept[-level.layers :]
            x = UpBlock(level, name=f"up_blocks_{index}")(x, tuple(taken), time, text)
        x = nn.silu(group_norm(config.norm_num_groups, config.norm_eps, "conv_norm_out")(x))
        return conv(config.out_channels, "conv_out")(x)

    def _check(self, sample: jax.Array, text: jax.Array) -> None:
        height, width, channels = sample.shape[1:]
        config = self.config
        if channels != config.in_channels or height % config.reduction or width % config.reduction:
            raise ValueError(
                f"latents of {height}x{width} with {channels} channels: expected multiples of {config.reduction}, and {config.in_channels} "
                "channels, in_channels of the UNet's config.json"
            )
        if text.shape[-1] != config.cross_attention_dim:
            raise ValueError(
                f"the text's width is {text.shape[-1]}, expected {config.cross_attention_dim}, cross_attention_dim of the UNet's file; "
                "take the text encoder that it was trained with"
            )


def attention(config: Config, heads: int, index: int) -> nn.Module:
    """A layer's attention to the image and the text."""
    kind = checkpointed(Transformer2DModel, config)
    how = (config.use_linear_projection, config.upcast_attention, config.lora_rank)
    return kind(heads, config.norm_num_groups, *how, name=f"attentions_{index}")


def down_levels(config: Config) -> list[Level]:
    """The blocks on the way down; all but the last halve the image."""
    last = len(config.block_out_channels) - 1
    rows = zip(config.down_block_types, config.block_out_channels, config.heads, strict=True)
    return [
        Level(config, width, heads if kind.startswith("CrossAttn") else None, config.layers_per_block, index < last)
        for index, (kind, width, heads) in enumerate(rows)
    ]


def up_levels(config: Config) -> list[Level]:
    """The blocks on the way up; all but the last double the image."""
    last = len(config.block_out_channels) - 1
    rows = zip(config.up_block_types, reversed(config.block_out_channels), reversed(config.heads), strict=True)
    return [
        Level(config, width, heads if kind.startswith("CrossAttn") else None, config.layers_per_block + 1, index < last)
        for index, (kind, width, heads) in enumerate(rows)
    ]


def timestep_waves(config: Config, timesteps: jax.Array) -> jax.Array:
    """Timesteps [B] as sines and cosines [B, C] of periods from 1 to 10000 (Vaswani et al., 2017), in fp32."""
    half = config.block_out_channels[0] // 2
    falling = jnp.arange(half, dtype=jnp.float32) * (-math.log(LONGEST_PERIOD) / (half - config.freq_shift))
    angles = timesteps[:, None].astype(jnp.float32) * jnp.exp(falling)
    waves = (jnp.cos(angles), jnp.sin(angles)) if config.flip_sin_to_cos else (jnp.sin(angles), jnp.cos(angles))
    return jnp.concatenate(waves, axis=-1)
