"""The first network of MindSpore's training guide: ReLU, the mean over the image, one dense layer."""

from __future__ import annotations

import jax
from flax import linen as nn

TORCH_LAYERS = {"dense": "dense"}
"""PyTorch module name -> Flax module name."""


class ReLUReduceMeanDense(nn.Module):
    """Images [B, H, W, C] -> logits [B, classes]; kernel and bias are all ones unless told otherwise, as in the guide."""

    classes: int = 1000
    kernel_init: nn.initializers.Initializer = nn.initializers.ones
    bias_init: nn.initializers.Initializer = nn.initializers.ones

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Return the logits [B, classes] of a batch of images [B, H, W, C]."""
        x = nn.relu(images).mean(axis=(1, 2))  # [B, H, W, C] -> [B, C]
        return nn.Dense(self.classes, kernel_init=self.kernel_init, bias_init=self.bias_init, name="dense")(x)
