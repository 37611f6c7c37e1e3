"""LeNet-5 as MindSpore's training guide has it: 32x32 grey images, no bias in the convolutions, narrow initial weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

TORCH_LAYERS = {"conv1": "conv1", "conv2": "conv2", "fc1": ("fc1", 16, 5, 5), "fc2": "fc2", "fc3": "fc3"}
"""PyTorch module name -> Flax module name; for a layer after flattening, with the channels, height and width that were flattened."""

INIT = nn.initializers.truncated_normal(0.02)
"""MindSpore's TruncatedNormal(0.02): normal with deviation 0.02, drawn again beyond two deviations."""


class LeNet5(nn.Module):
    """Two convolutions with max pooling, then three dense layers: images [B, 32, 32, 1] -> logits [B, classes]."""

    classes: int = 10

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Return the logits [B, classes] of a batch of images [B, 32, 32, 1]."""
        x = self._conv_pool(images, 6, "conv1")  # -> [B, 14, 14, 6]
        x = self._conv_pool(x, 16, "conv2")  # -> [B, 5, 5, 16]
        x = x.reshape(x.shape[0], -1)  # -> [B, 400], in the order H, W, C
        x = nn.relu(self._dense(x, 120, "fc1"))
        x = nn.relu(self._dense(x, 84, "fc2"))
        return self._dense(x, self.classes, "fc3")

    def _conv_pool(self, x: jax.Array, features: int, name: str) -> jax.Array:
        x = nn.Conv(features, (5, 5), padding="VALID", use_bias=False, kernel_init=INIT, name=name)(x)
        return nn.max_pool(nn.relu(x), (2, 2), (2, 2))

    def _dense(self, x: jax.Array, features: int, name: str) -> jax.Array:
        return nn.Dense(features, kernel_init=INIT, bias_init=INIT, name=name)(x)


def lenet_step(batch: int) -> tuple[LeNet5, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """What a training step takes: the model, images [batch, 32, 32, 1], labels [batch]; shapes only."""
    return LeNet5(), jax.ShapeDtypeStruct((batch, 32, 32, 1), jnp.float32), jax.ShapeDtypeStruct((batch,), jnp.int32)
