"""AlexNet, in the widths of torchvision and in those of MindSpore's model zoo."""

from __future__ import annotations

import jax
from flax import linen as nn

CONVOLUTIONS = ((11, 4), (5, 1), (3, 1), (3, 1), (3, 1))
"""Window and stride of each convolution; the first, second and last are followed by a max pooling."""

TORCHVISION = (64, 192, 384, 256, 256)
MINDSPORE = (64, 128, 192, 256, 256)
"""Output channels of each convolution."""

POOLED = (0, 1, 4)
KERNEL_INIT = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class AlexNet(nn.Module):
    """Five convolutions with max pooling, then three dense layers: images [B, 227, 227, 3] (or 224) -> logits [B, classes]."""

    classes: int = 1000
    channels: tuple[int, ...] = TORCHVISION
    dropout: float = 0.5

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Return the logits [B, classes] of a batch of images [B, H, W, 3]; `train` turns on dropout, from the stream "dropout"."""
        x = images
        for index, (features, (window, stride)) in enumerate(zip(self.channels, CONVOLUTIONS, strict=True)):
            x = nn.relu(nn.Conv(features, (window, window), stride, kernel_init=KERNEL_INIT, name=f"conv{index + 1}")(x))
            if index in POOLED:
                x = nn.max_pool(x, (3, 3), (2, 2))
        x = x.reshape(x.shape[0], -1)  # [B, 6, 6, 256] -> [B, 9216]
        for name in ("fc1", "fc2"):
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
            x = nn.relu(nn.Dense(4096, kernel_init=KERNEL_INIT, name=name)(x))
        return nn.Dense(self.classes, kernel_init=KERNEL_INIT, name="fc3")(x)
