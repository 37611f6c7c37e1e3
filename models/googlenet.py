"""GoogLeNet with batch normalisation and without auxiliary outputs, as torchvision and MindSpore's model zoo have it."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from flax import linen as nn
from jax import numpy as jnp

from .norm import BatchNorm

INCEPTIONS: Mapping[str, tuple[int, int, int, int, int, int]] = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""Name -> channels: 1x1; 3x3's reduction and 3x3; 5x5's reduction and 5x5 (both networks use a 3x3 there); after the pooling."""

POOLED_BEFORE: Mapping[str, int] = {"3a": 3, "4a": 3, "5a": 2}
"""Inception -> window of the max pooling at stride 2 in front of it."""

KERNEL_INIT = nn.initializers.truncated_normal(0.02)


class Unit(nn.Module):
    """Convolution, batch normalisation, ReLU: [B, H, W, C] -> [B, H / stride, W / stride, features]."""

    features: int
    window: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return relu(norm(conv(x)))."""
        size = (self.window, self.window)
        x = nn.Conv(self.features, size, self.stride, use_bias=False, kernel_init=KERNEL_INIT, name="conv")(x)
        return nn.relu(BatchNorm(epsilon=1e-3, name="bn")(x, train))


class Inception(nn.Module):
    """Four branches side by side: [B, H, W, C] -> [B, H, W, sum of their channels]."""

    channels: tuple[int, int, int, int, int, int]

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return the branches, concatenated."""
        one, three_in, three, five_in, five, pooled = self.channels
        branches = (
            Unit(one, 1, name="branch1")(x, train),
            Unit(three, 3, name="branch2_1")(Unit(three_in, 1, name="branch2_0")(x, train), train),
            Unit(five, 3, name="branch3_1")(Unit(five_in, 1, name="branch3_0")(x, train), train),
            Unit(pooled, 1, name="branch4")(nn.max_pool(x, (3, 3), (1, 1), "SAME"), train),
        )
        return jnp.concatenate(branches, axis=-1)


class GoogLeNet(nn.Module):
    """A stem, nine inceptions, the mean over the image, a dense layer: images [B, H, W, 3] -> logits [B, classes]."""

    classes: int = 1000
    dropout: float = 0.2

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Return the logits [B, classes] of a batch of images [B, H, W, 3]; `train` normalises by the batch and turns on dropout."""
        x = Unit(64, 7, 2, name="conv1")(images, train)
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        x = Unit(192, 3, name="conv3")(Unit(64, 1, name="conv2")(x, train), train)
        for name, channels in INCEPTIONS.items():
            if window := POOLED_BEFORE.get(name):
                x = nn.max_pool(x, (window, window), (2, 2), "SAME")
            x = Inception(channels, name=f"inception{name}")(x, train)
        x = nn.Dropout(self.dropout, deterministic=not train)(x.mean(axis=(1, 2)))  # [B, h, w, 1024] -> [B, 1024]
        return nn.Dense(self.classes, kernel_init=KERNEL_INIT, name="fc")(x)
