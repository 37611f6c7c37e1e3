"""The bottleneck attention module of Park et al. (2018): where and in which channels a feature map matters."""

from __future__ import annotations

import jax
from flax import linen as nn
from jax import numpy as jnp

from .norm import BatchNorm


class BottleneckAttention(nn.Module):
    """Scale a feature map by 1 + sigmoid(channels + places): [B, H, W, C] -> [B, H, W, C].

    Channels are judged by two dense layers on their means, places by two dilated 3x3 convolutions between 1x1 ones, both on C / `reduction`
    features, each normalised over the batch.
    """

    reduction: int = 16
    dilation: int = 4

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return x * (1 + sigmoid(channels [B, 1, 1, C] + places [B, H, W, 1]))."""
        narrow, wide = max(1, x.shape[-1] // self.reduction), x.shape[-1]
        y = nn.Dense(narrow, name="channel_in")(x.mean(axis=(1, 2)))
        y = nn.relu(BatchNorm(name="channel_in_bn")(y, train))
        channels = BatchNorm(name="channel_out_bn")(nn.Dense(wide, name="channel_out")(y), train)
        y = nn.relu(BatchNorm(name="place_in_bn")(nn.Conv(narrow, (1, 1), name="place_in")(x), train))
        for number in range(2):
            y = nn.Conv(narrow, (3, 3), kernel_dilation=self.dilation, name=f"place_{number}")(y)
            y = nn.relu(BatchNorm(name=f"place_{number}_bn")(y, train))
        places = BatchNorm(name="place_out_bn")(nn.Conv(1, (1, 1), name="place_out")(y), train)
        return x + x * nn.sigmoid(jnp.expand_dims(channels, (1, 2)) + places)
