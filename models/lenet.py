"""LeNet-5 as MindSpore's training guide has it: 32x32 grey images, no bias in the convolutions, narrow initial weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

TORCH_LAYERS = {"conv1": "conv1", "conv2": "conv2", "fc1": ("fc1", 16, 5, 5), "fc2": "fc2", "fc3": "fc3"}
"""PyTorch module name -> Flax module name; for a layer after flattening, with the channels, height and width that were flattened."""


class FiveLayers(nn.Module):
    """Two convolutions with max pooling, then three dense layers: images [B, 32, 32, C] -> logits [B, classes].

    `initializer`: what draws the weights and biases of a layer, by how many products it sums.
    """

    classes: int = 10
    conv_bias: ClassVar[bool] = True
    initializer: ClassVar[Callable[[int], nn.initializers.Initializer]]

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Return the logits [B, classes] of a batch of images [B, 32, 32, C]."""
        return self._dense(self._features(images), self.classes, "fc3")

    def _features(self, images: jax.Array) -> jax.Array:
        x = self._conv_pool(images, 6, "conv1")  # -> [B, 14, 14, 6]
        x = self._conv_pool(x, 16, "conv2")  # -> [B, 5, 5, 16]
        x = x.reshape(x.shape[0], -1)  # -> [B, 400], in the order H, W, C
        x = nn.relu(self._dense(x, 120, "fc1"))
        return nn.relu(self._dense(x, 84, "fc2"))

    def _conv_pool(self, x: jax.Array, features: int, name: str) -> jax.Array:
        window = (5, 5)
        init = self.initializer(math.prod(window) * x.shape[-1])
        x = nn.Conv(features, window, padding="VALID", use_bias=self.conv_bias, kernel_init=init, bias_init=init, name=name)(x)
        return nn.max_pool(nn.relu(x), (2, 2), (2, 2))

    def _dense(self, x: jax.Array, features: int, name: str) -> jax.Array:
        init = self.initializer(x.shape[-1])
        return nn.Dense(features, kernel_init=init, bias_init=init, name=name)(x)


def narrow(fan_in: int) -> nn.initializers.Initializer:
    """MindSpore's TruncatedNormal(0.02), whatever the layer: normal with deviation 0.02, drawn again beyond two deviations."""
    del fan_in
    return nn.initializers.truncated_normal(0.02)


class LeNet5(FiveLayers):
    """The guide's network, for grey images [B, 32, 32, 1]."""

    conv_bias = False
    initializer = staticmethod(narrow)


def lenet_step(batch: int) -> tuple[LeNet5, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """What a training step takes: the model and a batch, images [batch, 32, 32, 1] and labels [batch]; shapes only."""
    return LeNet5(), (jax.ShapeDtypeStruct((batch, 32, 32, 1), jnp.float32), jax.ShapeDtypeStruct((batch,), jnp.int32))
