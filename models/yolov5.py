"""YOLOv5 as its releases 6.2 and 7.0 have it, in the sizes n to x, and n6 to x6 with a fourth map; and others of these architectures.

Layers are numbered as in the original's configuration files and are called `model_0` to `model_24` (`model_33`), their parts as there, so
that its weights fit; `TORCH_LAYERS` says which of its modules is which.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from jax import numpy as jnp

from .norm import BatchNorm
from .yolov5_config import OF_A_BOX, Config, Row, config_of_cfg, config_of_name

KERNEL_INIT = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
"""PyTorch's: uniform up to 1 / sqrt(inputs of an output)."""


class ConvBlock(nn.Module):
    """Convolution, batch normalisation, SiLU: [B, H, W, C] -> [B, H / stride, W / stride, features]."""

    features: int
    window: int = 1
    stride: int = 1
    padding: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Pad by half the window, unless told otherwise."""
        around = self.window // 2 if self.padding is None else self.padding
        x = nn.Conv(
            self.features, (self.window, self.window), self.stride, padding=around, use_bias=False, kernel_init=KERNEL_INIT, name="conv"
        )(x)
        return nn.silu(BatchNorm(epsilon=1e-3, momentum=0.97, name="bn")(x, train))


class Bottleneck(nn.Module):
    """A 1x1 and a 3x3 convolution, with a way around them if `shortcut`; the shape stays."""

    shortcut: bool

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return f(x), or x + f(x)."""
        features = x.shape[-1]
        y = ConvBlock(features, 3, name="cv2")(ConvBlock(features, name="cv1")(x, train), train)
        return x + y if self.shortcut else y


class C3(nn.Module):
    """Two branches of half the features, bottlenecks in one of them, joined by a convolution: [B, H, W, C] -> [B, H, W, features]."""

    features: int
    blocks: int
    shortcut: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Cross-stage partial network with three convolutions."""
        half = self.features // 2
        y = ConvBlock(half, name="cv1")(x, train)
        for index in range(self.blocks):
            y = Bottleneck(self.shortcut, name=f"m_{index}")(y, train)
        other = ConvBlock(half, name="cv2")(x, train)
        return ConvBlock(self.features, name="cv3")(jnp.concatenate([y, other], axis=-1), train)


class SPPF(nn.Module):
    """Maxima over windows of k, 2k - 1 and 3k - 2, one after another, beside their input: [B, H, W, C] -> [B, H, W, features]."""

    features: int
    window: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Spatial pyramid pooling."""
        parts = [ConvBlock(x.shape[-1] // 2, name="cv1")(x, train)]
        around: Any = ((self.window // 2, self.window // 2),) * 2
        for _ in range(3):
            parts.append(nn.max_pool(parts[-1], (self.window, self.window), (1, 1), around))
        return ConvBlock(self.features, name="cv2")(jnp.concatenate(parts, axis=-1), train)


class Detect(nn.Module):
    """A 1x1 convolution of each feature map to its predictions: [B, H, W, C] each -> [B, H, W, anchors, 5 + classes] each."""

    config: Config

    @nn.compact
    def __call__(self, features: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Return the raw maps."""
        return tuple(self._map(index, x) for index, x in enumerate(features))

    def _map(self, index: int, x: jax.Array) -> jax.Array:
        config, shape = self.config, x.shape
        boxes = len(config.anchors[index])
        bias = _bias_init(config, index, shape[-1])
        x = nn.Conv(boxes * config.outputs, (1, 1), kernel_init=KERNEL_INIT, bias_init=bias, name=f"m_{index}")(x)
        return x.reshape(*shape[:-1], boxes, config.outputs)  # [B, H, W, A * (5 + C)] -> [B, H, W, A, 5 + C]


def _bias_init(config: Config, index: int, inputs: int) -> nn.initializers.Initializer:
    """PyTorch's draw, moved so that at first 8 objects are expected in an image of 640x640, and 0.6 classes for each.

    That is the start of the focal loss (Lin et al., arXiv:1708.02002, section 3.3) with the numbers of the release.
    """
    cells = (640 / config.strides[index]) ** 2
    moved = jnp.zeros(config.outputs).at[OF_A_BOX - 1].set(math.log(8 / cells))
    moved = moved.at[OF_A_BOX:].set(math.log(0.6 / (config.classes - 0.99999)))
    bound = 1 / math.sqrt(inputs)

    def initial(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        drawn = jax.random.uniform(key, shape, dtype, -bound, bound)
        return drawn + jnp.tile(moved, shape[0] // config.outputs).astype(dtype)

    return initial


def _conv(config: Config, row: Row, name: str, xs: Sequence[jax.Array], train: bool) -> jax.Array:
    features, *others = row.options
    return ConvBlock(config.channels(features), *others, name=name)(xs[0], train)


def _c3(config: Config, row: Row, name: str, xs: Sequence[jax.Array], train: bool) -> jax.Array:
    features, *others = row.options
    return C3(config.channels(features), config.repeats(row.blocks), *others, name=name)(xs[0], train)


def _sppf(config: Config, row: Row, name: str, xs: Sequence[jax.Array], train: bool) -> jax.Array:
    features, window = row.options
    return SPPF(config.channels(features), window, name=name)(xs[0], train)


def _upsample(config: Config, row: Row, name: str, xs: Sequence[jax.Array], train: bool) -> jax.Array:
    """Each pixel twice along height and width."""
    (x,), times = xs, row.options[1]
    b, h, w, c = x.shape
    wide = jnp.broadcast_to(x[:, :, None, :, None, :], (b, h, times, w, times, c))
    return wide.reshape(b, times * h, times * w, c)


def _concat(config: Config, row: Row, name: str, xs: Sequence[jax.Array], train: bool) -> jax.Array:
    return jnp.concatenate(xs, axis=-1)


def _detect(config: Config, row: Row, name: str, xs: Sequence[jax.Array], train: bool) -> Any:
    return Detect(config, name=name)(xs)


KINDS: Mapping[str, Callable[[Config, Row, str, Sequence[jax.Array], bool], Any]] = {
    "Conv": _conv,
    "C3": _c3,
    "SPPF": _sppf,
    "nn.Upsample": _upsample,
    "Concat": _concat,
    "Detect": _detect,
}
"""Kind of a layer -> what it makes of its inputs; its modules become those of the network that calls."""


class YOLOv5(nn.Module):
    """The network: images [B, H, W, 3] from 0 to 1, height and width multiples of the coarsest stride -> the raw maps, finest first.

    Each is [B, H / stride, W / stride, anchors, 5 + classes]: centre x and y, width and height relative to cell and anchor, objectness and
    classes, all before their sigmoid. `decode` makes boxes of them.
    """

    config: Config

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> tuple[jax.Array, ...]:
        """Return the raw maps; `train` normalises by the batch's own statistics."""
        coarsest = max(self.config.strides)
        if any(side % coarsest for side in images.shape[1:3]):
            raise ValueError(f"YOLOv5: images of {images.shape[1]}x{images.shape[2]}, expected multiples of {coarsest}")
        results: list[Any] = [images]
        for index, row in enumerate(self.config.architecture.rows):
            xs = [results[-1] if source == -1 else results[source + 1] for source in row.sources]
            results.append(KINDS[row.kind](self.config, row, f"model_{index}", xs, train))
        return results[-1]


TORCH_LAYERS: Mapping[str, str | None] = {
    "model.*.conv": "model_*/conv",
    "model.*.bn": "model_*/bn",
    **{
        f"model.*.{part}.{kind}": f"model_*/{part}/{kind}"
        for part in ("cv1", "cv2", "cv3") for kind in ("conv", "bn")
    },
    **{
        f"model.*.m.*.{part}.{kind}": f"model_*/m_*/{part}/{kind}"
        for part in ("cv1", "cv2") for kind in ("conv", "bn")
    },
    "model.*.m.*": "model_*/m_*",
    "model.*.anchors": None,
    "model.*.anchor_grid": None,
}  # fmt: skip
"""The original's module -> ours."""


def decode(maps: Sequence[jax.Array], config: Config) -> jax.Array:
    """The predictions of raw maps, [B, N, 5 + classes]: centre x, centre y, width and height in pixels, objectness, classes, 0 to 1.

    In the original's order: map by map, of each its first anchor's predictions row by row, then the second anchor's.
    """
    return jnp.concatenate([_decoded(x, config, index) for index, x in enumerate(maps)], axis=1)


def _decoded(x: jax.Array, config: Config, index: int) -> jax.Array:
    b, h, w, boxes, outputs = x.shape
    x = nn.sigmoid(x.transpose(0, 3, 1, 2, 4))  # [B, H, W, A, 5 + C] -> [B, A, H, W, 5 + C]
    column = jax.lax.broadcasted_iota(x.dtype, (h, w), 1)
    row = jax.lax.broadcasted_iota(x.dtype, (h, w), 0)
    cells = jnp.stack([column, row], axis=-1) - 0.5  # [H, W, 2]
    anchors = jnp.asarray(config.anchors[index], x.dtype)[:, None, None]  # [A, 1, 1, 2]
    centres = (x[..., :2] * 2 + cells) * config.strides[index]
    sizes = jnp.square(x[..., 2:4] * 2) * anchors
    return jnp.concatenate([centres, sizes, x[..., 4:]], axis=-1).reshape(b, boxes * h * w, outputs)


def yolov5(name_or_cfg: str | Mapping[str, Any], classes: int | None = None) -> YOLOv5:
    """The network of a size's name such as "yolov5s", or of what one of the original's configuration files holds.

    classes: in place of the 80 of a name, or of the file's `nc`.

    Raises:
      ValueError: the name is unknown, or the file is of another architecture.
    """
    config = config_of_name(name_or_cfg) if isinstance(name_or_cfg, str) else config_of_cfg(name_or_cfg)
    return YOLOv5(config if classes is None else dataclasses.replace(config, classes=classes))
