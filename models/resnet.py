"""Residual networks: ResNet-50 and -101 as MindSpore's mixed-precision guide has them; 18, 34 and 152 beside them.

Modules are named as torchvision's, so that its state dicts fit; what the two differ in is a `Style`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from .bam import BottleneckAttention
from .norm import BatchNorm

Initializer = nn.initializers.Initializer


@dataclass(frozen=True)
class Style:
    """How the layers of a residual network are made.

    With `even_padding` a window of k is padded by k // 2 on each side; without it as "same" does, where at stride 2 the end gets
    one row and column more than the beginning. `momentum` is the share of the old running statistics, `norm_axis` the mesh axis over whose
    chips batches are normalised together.
    """

    even_padding: bool
    epsilon: float
    momentum: float
    kernel_init: Initializer
    dense_init: Initializer
    norm_axis: str | None = None

    def conv(self, features: int, window: int, stride: int, name: str) -> nn.Conv:
        """A square convolution without bias."""
        size = (window, window)
        return nn.Conv(features, size, stride, padding=self.padding(window), use_bias=False, kernel_init=self.kernel_init, name=name)

    def norm(self, name: str, scale_init: Initializer = nn.initializers.ones) -> BatchNorm:
        """A batch normalisation."""
        return BatchNorm(self.epsilon, self.momentum, self.norm_axis, scale_init, name=name)

    def padding(self, window: int) -> Any:
        """The padding of a square window, in Flax's terms."""
        return [(window // 2, window // 2)] * 2 if self.even_padding else "SAME"


MINDSPORE = Style(
    even_padding=False, epsilon=1e-4, momentum=0.9, kernel_init=nn.initializers.normal(0.01), dense_init=nn.initializers.normal(0.01)
)
"""The guide's. Its script means to draw other initial weights later on (Xavier), but assigns them to an attribute that nothing reads."""

TORCHVISION = Style(
    even_padding=True,
    epsilon=1e-5,
    momentum=0.9,
    kernel_init=nn.initializers.variance_scaling(2.0, "fan_out", "normal"),
    dense_init=nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform"),
)
"""torchvision's, for its pretrained weights."""


class Basic(nn.Module):
    """Two 3x3 convolutions and a way around them: [B, H, W, C] -> [B, H / stride, W / stride, features]."""

    features: int
    stride: int
    style: Style
    expansion: ClassVar[int] = 1
    convolutions: ClassVar[int] = 2

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return relu(x + f(x))."""
        style = self.style
        y = nn.relu(style.norm("bn1")(style.conv(self.features, 3, self.stride, "conv1")(x), train))
        y = style.norm("bn2", nn.initializers.zeros)(style.conv(self.features, 3, 1, "conv2")(y), train)
        return nn.relu(y + _shortcut(style, x, self.features, self.stride, train))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a way around them: [B, H, W, C] -> [B, H / stride, W / stride, 4 * features]."""

    features: int
    stride: int
    style: Style
    expansion: ClassVar[int] = 4
    convolutions: ClassVar[int] = 3

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return relu(x + f(x))."""
        style, wide = self.style, self.expansion * self.features
        y = nn.relu(style.norm("bn1")(style.conv(self.features, 1, 1, "conv1")(x), train))
        y = nn.relu(style.norm("bn2")(style.conv(self.features, 3, self.stride, "conv2")(y), train))
        y = style.norm("bn3", nn.initializers.zeros)(style.conv(wide, 1, 1, "conv3")(y), train)
        return nn.relu(y + _shortcut(style, x, wide, self.stride, train))


def _shortcut(style: Style, x: jax.Array, features: int, stride: int, train: bool) -> jax.Array:
    """x itself, or a 1x1 convolution of it where the block changes its shape. The modules become those of the block that calls."""
    if stride == 1 and x.shape[-1] == features:
        return x
    return style.norm("downsample_bn")(style.conv(features, 1, stride, "downsample_conv")(x), train)


class ResNet(nn.Module):
    """A stem, four stages of blocks, the mean over the image, a dense layer: images [B, H, W, 3] -> logits [B, classes].

    The last normalisation of every block starts with scale 0, so that a fresh block is its shortcut. A module may stand `between` stages.
    """

    block: type[Basic] | type[Bottleneck]
    stages: tuple[int, ...]
    classes: int = 10
    style: Style = MINDSPORE
    width: int = 64
    between: type[BottleneckAttention] | None = None

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Return the logits [B, classes] of a batch of images [B, H, W, 3]; `train` normalises by the batch's own statistics."""
        x = nn.relu(self.style.norm("bn1")(self.style.conv(self.width, 7, 2, "conv1")(images), train))
        x = nn.max_pool(x, (3, 3), (2, 2), self.style.padding(3))
        for stage, blocks in enumerate(self.stages):
            if stage > 0 and self.between is not None:
                x = self.between(name=f"between{stage}")(x, train)
            for index in range(blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                x = self.block(self.width << stage, stride, self.style, name=f"layer{stage + 1}_{index}")(x, train)
        return nn.Dense(self.classes, kernel_init=self.style.dense_init, name="fc")(x.mean(axis=(1, 2)))  # [B, h, w, C] -> [B, C]


def torch_layers(model: ResNet) -> dict[str, str]:
    """PyTorch module name, as torchvision has it -> Flax module name."""
    names = {"conv1": "conv1", "bn1": "bn1", "fc": "fc"}
    for stage, blocks in enumerate(model.stages):
        for index in range(blocks):
            theirs, ours = f"layer{stage + 1}.{index}", f"layer{stage + 1}_{index}"
            parts = [f"{kind}{number + 1}" for number in range(model.block.convolutions) for kind in ("conv", "bn")]
            names |= {f"{theirs}.{part}": f"{ours}/{part}" for part in parts}
            if index == 0 and (stage > 0 or model.block.expansion > 1):
                names |= {f"{theirs}.downsample.0": f"{ours}/downsample_conv", f"{theirs}.downsample.1": f"{ours}/downsample_bn"}
    return names


def resnet18(classes: int = 10, style: Style = MINDSPORE) -> ResNet:
    """ResNet-18."""
    return ResNet(Basic, (2, 2, 2, 2), classes, style)


def resnet34(classes: int = 10, style: Style = MINDSPORE) -> ResNet:
    """ResNet-34."""
    return ResNet(Basic, (3, 4, 6, 3), classes, style)


def resnet50(classes: int = 10, style: Style = MINDSPORE) -> ResNet:
    """ResNet-50."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, style)


def resnet101(classes: int = 1001, style: Style = MINDSPORE) -> ResNet:
    """ResNet-101; 1001 classes as in the guide: ImageNet's and one for the background."""
    return ResNet(Bottleneck, (3, 4, 23, 3), classes, style)


def resnet152(classes: int = 1000, style: Style = MINDSPORE) -> ResNet:
    """ResNet-152."""
    return ResNet(Bottleneck, (3, 8, 36, 3), classes, style)


def resnet50_step(batch: int) -> tuple[ResNet, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """What a training step of ResNet-50 on ImageNet takes: the model and shapes of a batch, images [B, 224, 224, 3] and labels [B]."""
    return resnet50(1000), (jax.ShapeDtypeStruct((batch, 224, 224, 3), jnp.float32), jax.ShapeDtypeStruct((batch,), jnp.int32))
