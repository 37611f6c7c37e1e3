"""SqueezeNet 1.0 and 1.1 as torchvision has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from jax import numpy as jnp

Fires = Mapping[int, tuple[int, int]]

FIRES: Mapping[str, Fires] = {
    "1.0": {3: (16, 64), 4: (16, 64), 5: (32, 128), 7: (32, 128), 8: (48, 192), 9: (48, 192), 10: (64, 256), 12: (64, 256)},
    "1.1": {3: (16, 64), 4: (16, 64), 6: (32, 128), 7: (32, 128), 9: (48, 192), 10: (48, 192), 11: (64, 256), 12: (64, 256)},
}
"""Version -> index in torchvision's `features` -> channels of a fire's squeeze, and of each of its two expansions."""

STEMS: Mapping[str, tuple[int, int]] = {"1.0": (96, 7), "1.1": (64, 3)}
"""Version -> channels and window of the first convolution."""

FIRST_POOL = 2
"""Index of the first max pooling; the other two are at the gaps in FIRES."""

KERNEL_INIT = nn.initializers.variance_scaling(2.0, "fan_in", "uniform")
LAST_INIT = nn.initializers.normal(0.01)


class Fire(nn.Module):
    """Squeeze to few channels, expand by 1x1 and 3x3 convolutions side by side: [B, H, W, C] -> [B, H, W, 2 * expand]."""

    squeeze: int
    expand: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return both expansions, concatenated."""
        x = nn.relu(nn.Conv(self.squeeze, (1, 1), kernel_init=KERNEL_INIT, name="squeeze")(x))
        one = nn.relu(nn.Conv(self.expand, (1, 1), kernel_init=KERNEL_INIT, name="expand1x1")(x))
        three = nn.relu(nn.Conv(self.expand, (3, 3), padding=1, kernel_init=KERNEL_INIT, name="expand3x3")(x))
        return jnp.concatenate((one, three), axis=-1)


class SqueezeNet(nn.Module):
    """A convolution, eight fires, a 1x1 convolution to the classes, the mean over the image: images [B, H, W, 3] -> logits [B, classes].

    `residual` adds the input of every fire that has as many channels as its output (the "simple bypass").
    """

    classes: int = 1000
    version: str = "1.0"
    dropout: float = 0.5
    residual: bool = False

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Return the logits [B, classes] of a batch of images [B, H, W, 3]; `train` turns on dropout, from the stream "dropout"."""
        features, window = STEMS[self.version]
        fires = FIRES[self.version]
        x = nn.relu(nn.Conv(features, (window, window), 2, padding="VALID", kernel_init=KERNEL_INIT, name="features_0")(images))
        for index in range(FIRST_POOL, max(fires) + 1):
            y = Fire(*fires[index], name=f"features_{index}")(x) if index in fires else _max_pool(x)
            x = x + y if self.residual and x.shape == y.shape else y
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        x = nn.relu(nn.Conv(self.classes, (1, 1), kernel_init=LAST_INIT, name="classifier_1")(x))
        return x.mean(axis=(1, 2))  # [B, h, w, classes] -> [B, classes]


def torch_layers(model: SqueezeNet) -> dict[str, str]:
    """PyTorch module name, as torchvision has it -> Flax module name."""
    fires = {
        f"features.{index}.{part}": f"features_{index}/{part}"
        for index in FIRES[model.version]
        for part in ("squeeze", "expand1x1", "expand3x3")
    }
    return {"features.0": "features_0", **fires, "classifier.1": "classifier_1"}


def _max_pool(x: jax.Array) -> jax.Array:
    """Windows of 3 at stride 2; the last one may reach over the edge (PyTorch's ceil_mode)."""
    padding: Any = [(0, (extent - 3) % 2) for extent in x.shape[1:3]]  # Flax's annotation names strings only
    return nn.max_pool(x, (3, 3), (2, 2), padding)
