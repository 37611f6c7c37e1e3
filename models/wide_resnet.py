"""Wide residual networks (Zagoruyko and Komodakis, 2016): WRN-depth-widening for images of 32 x 32."""

from __future__ import annotations

import jax
from flax import linen as nn

from .norm import BatchNorm

KERNEL_INIT = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
STRIDES = (1, 2, 2)
"""Of the first block of each group."""


class WideBlock(nn.Module):
    """Two 3x3 convolutions, each normalised before, and a way around them: [B, H, W, C] -> [B, H / stride, W / stride, features]."""

    features: int
    stride: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return x + f(x); a 1x1 convolution takes the place of x where the block changes its shape."""
        y = nn.relu(BatchNorm(name="bn1")(x, train))
        y = nn.Dropout(self.dropout, deterministic=not train)(y)
        y = _conv(self.features, 3, self.stride, "conv1")(y)
        y = _conv(self.features, 3, 1, "conv2")(nn.relu(BatchNorm(name="bn2")(y, train)))
        if x.shape != y.shape:
            x = _conv(self.features, 1, self.stride, "shortcut")(x)
        return x + y


class WideResNet(nn.Module):
    """A convolution, three groups of (depth - 4) / 6 blocks, the mean, a dense layer: images [B, H, W, 3] -> logits [B, classes]."""

    depth: int = 40
    widening: int = 10
    classes: int = 10
    dropout: float = 0.3

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Return the logits [B, classes] of a batch of images [B, H, W, 3]; `train` normalises by the batch and turns on dropout."""
        x = _conv(16, 3, 1, "conv1")(images)
        for group, first in enumerate(STRIDES):
            features = (16 << group) * self.widening
            for index in range((self.depth - 4) // 6):
                x = WideBlock(features, first if index == 0 else 1, self.dropout, name=f"group{group + 1}_{index}")(x, train)
        x = nn.relu(BatchNorm(name="bn")(x, train))
        return nn.Dense(self.classes, name="fc")(x.mean(axis=(1, 2)))  # [B, h, w, C] -> [B, C]


def _conv(features: int, window: int, stride: int, name: str) -> nn.Conv:
    return nn.Conv(features, (window, window), stride, use_bias=False, kernel_init=KERNEL_INIT, name=name)
