"""The network of PyTorch's CIFAR-10 tutorial."""

from __future__ import annotations

import math

import jax
from flax import linen as nn

from models.mlp import torch_uniform

TORCH_LAYERS = {"conv1": "conv1", "conv2": "conv2", "fc1": ("fc1", 16, 5, 5), "fc2": "fc2", "fc3": "fc3"}
"""PyTorch module name -> Flax module name; for a layer after flattening, with the channels, height and width that were flattened."""


class CifarNet(nn.Module):
    """Two convolutions with max pooling, then three dense layers: images [B, 32, 32, 3] -> logits [B, classes].

    Initialised as PyTorch initialises `nn.Conv2d` and `nn.Linear`, with JAX's random bits.
    """

    classes: int = 10

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Return the logits [B, classes] of a batch of images [B, 32, 32, 3]."""
        x = self._conv_pool(images, 6, "conv1")  # -> [B, 14, 14, 6]
        x = self._conv_pool(x, 16, "conv2")  # -> [B, 5, 5, 16]
        x = x.reshape(x.shape[0], -1)  # -> [B, 400], in the order H, W, C
        x = nn.relu(self._dense(x, 120, "fc1"))
        x = nn.relu(self._dense(x, 84, "fc2"))
        return self._dense(x, self.classes, "fc3")

    def _conv_pool(self, x: jax.Array, features: int, name: str) -> jax.Array:
        window = (5, 5)
        init = torch_uniform(math.prod(window) * x.shape[-1])
        x = nn.Conv(features, window, padding="VALID", kernel_init=init, bias_init=init, name=name)(x)
        return nn.max_pool(nn.relu(x), (2, 2), (2, 2))

    def _dense(self, x: jax.Array, features: int, name: str) -> jax.Array:
        init = torch_uniform(x.shape[-1])
        return nn.Dense(features, kernel_init=init, bias_init=init, name=name)(x)
