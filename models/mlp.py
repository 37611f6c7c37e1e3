"""The multi-layer perceptron of the MNIST example."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from flax import linen as nn
from jax import numpy as jnp

TORCH_LAYERS = {"linear_relu_stack.0": "Dense_0", "linear_relu_stack.2": "Dense_1", "linear_relu_stack.4": "Dense_2"}
"""PyTorch module name -> Flax module name, for the documented network `nn.Sequential(Linear, ReLU, Linear, ReLU, Linear)`."""


def torch_uniform(fan_in: int) -> jax.nn.initializers.Initializer:
    """PyTorch's default for the kernel and the bias of a linear layer: uniform in +-1/sqrt(fan_in).

    The bias does not show the layer's input width, so it is given here.
    """
    bound = 1.0 / math.sqrt(fan_in)

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
        del out_sharding
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


class MLP(nn.Module):
    """Flatten, then Dense layers with ReLU between them: images [B, ...] -> logits [B, classes].

    Initialised as PyTorch initialises `nn.Linear`, with JAX's random bits.
    """

    hidden: Sequence[int] = (512, 512)
    classes: int = 10

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Return the logits [B, classes] of a batch of images [B, ...]."""
        x = images.reshape(images.shape[0], -1)  # [B, H, W] -> [B, H*W]
        for width in self.hidden:
            x = nn.relu(self._dense(x, width))
        return self._dense(x, self.classes)

    def _dense(self, x: jax.Array, width: int) -> jax.Array:
        init = torch_uniform(x.shape[-1])
        return nn.Dense(width, kernel_init=init, bias_init=init)(x)
