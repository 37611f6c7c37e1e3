"""VGG-16 as torchvision has it."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from flax import linen as nn
from jax import numpy as jnp

CONVOLUTIONS: Mapping[int, int] = {
    0: 64,
    2: 64,
    5: 128,
    7: 128,
    10: 256,
    12: 256,
    14: 256,
    17: 512,
    19: 512,
    21: 512,
    24: 512,
    26: 512,
    28: 512,
}
"""Index in torchvision's `features` -> output channels; a gap of three is a max pooling between."""

POOLED_AFTER = frozenset({2, 7, 14, 21, 28})
SIDE = 7
"""Height and width of the features that the dense layers see, whatever the image."""

TORCH_LAYERS = {
    **{f"features.{index}": f"features_{index}" for index in CONVOLUTIONS},
    "classifier.0": ("classifier_0", 512, SIDE, SIDE),
    "classifier.3": "classifier_3",
    "classifier.6": "classifier_6",
}
"""PyTorch module name -> Flax module name; for a layer after flattening, with the channels, height and width that were flattened."""

CONV_INIT = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
DENSE_INIT = nn.initializers.normal(0.01)


class VGG16(nn.Module):
    """Thirteen 3x3 convolutions with max pooling, then three dense layers: images [B, H, W, 3] (H, W >= 32) -> logits [B, classes]."""

    classes: int = 1000
    hidden: int = 4096
    dropout: float = 0.5

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Return the logits [B, classes] of a batch of images [B, H, W, 3]; `train` turns on dropout, from the stream "dropout"."""
        x = images
        for index, features in CONVOLUTIONS.items():
            x = nn.relu(nn.Conv(features, (3, 3), padding=1, kernel_init=CONV_INIT, name=f"features_{index}")(x))
            if index in POOLED_AFTER:
                x = nn.max_pool(x, (2, 2), (2, 2))
        x = _adaptive_mean(_adaptive_mean(x, 1), 2)  # -> [B, 7, 7, 512]
        x = x.reshape(x.shape[0], -1)  # -> [B, 25088], in the order H, W, C
        for index in (0, 3):
            x = nn.relu(nn.Dense(self.hidden, kernel_init=DENSE_INIT, name=f"classifier_{index}")(x))
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.classes, kernel_init=DENSE_INIT, name="classifier_6")(x)


def _adaptive_mean(x: jax.Array, axis: int) -> jax.Array:
    """Means of SIDE windows that cover the axis evenly, as PyTorch's AdaptiveAvgPool2d; they overlap where SIDE does not divide it."""
    extent = x.shape[axis]
    if extent == SIDE:
        return x
    windows = [(i * extent // SIDE, -(-(i + 1) * extent // SIDE)) for i in range(SIDE)]
    means = [jax.lax.slice_in_dim(x, start, end, axis=axis).mean(axis, keepdims=True) for start, end in windows]
    return jnp.concatenate(means, axis)
