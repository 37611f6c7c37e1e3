"""Image transforms over whole batches [B, H, W, C] in NumPy; random ones draw from the stream that they are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

from tpuflow.errors import ConfigError

WEIGHT_BITS = 11
"""Binary places of OpenCV's interpolation weights for bytes."""


class Transform(Protocol):
    """A function of images [B, H, W, C] and a random stream that gives images; it never changes what it was given."""

    def __call__(self, images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The transformed images."""
        ...


@dataclass(frozen=True, slots=True)
class Resize:
    """Bilinear resizing of bytes, bit for bit OpenCV's INTER_LINEAR, which MindSpore's Resize (Inter.LINEAR) calls.

    Pixel centres are at half numbers: output i lies at (i + 0.5) * in / out - 0.5 of the input. Beyond the outermost centres the edge is
    repeated. There is no smoothing before shrinking. Weights have 11 binary places.
    """

    height: int
    width: int

    def __call__(self, images: np.ndarray, rng: np.random.Generator | None = None) -> np.ndarray:
        """uint8 [B, H, W, C] -> uint8 [B, height, width, C]."""
        if images.dtype != np.uint8 or images.ndim != 4:
            raise ConfigError(
                f"Resize: expected uint8 images [B, H, W, C], got {images.dtype}{list(images.shape)}; resize before rescaling."
            )
        if images.shape[1:3] == (self.height, self.width):
            return images
        low, high, low_weight, high_weight = _columns(images.shape[2], self.width)
        rows = np.take(images, low, axis=2) * low_weight + np.take(images, high, axis=2) * high_weight  # int32 [B, H, width, C]
        rows >>= 4
        low, high, low_weight, high_weight = _rows(images.shape[1], self.height)
        above, below = np.take(rows, low, axis=1), np.take(rows, high, axis=1)  # [B, height, width, C]
        above *= low_weight
        above >>= 16
        below *= high_weight
        below >>= 16
        above += below
        above += 2
        above >>= 2
        return above.astype(np.uint8)


Weights = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@cache
def _columns(extent: int, target: int) -> Weights:
    """Along a row the nearer pixel has the whole weight beyond the outermost centres."""
    low, share = _places(extent, target)
    share = np.where((low < 0) | (low >= extent - 1), np.float32(0), share)
    return _weights(low, share, extent, (target, 1))


@cache
def _rows(extent: int, target: int) -> Weights:
    """Down a column both weights stay, on the same row twice: the sum is the same but for its rounding."""
    low, share = _places(extent, target)
    return _weights(low, share, extent, (target, 1, 1))


def _places(extent: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    """For each output, the input before it and the share of the input after it, in float32 as OpenCV."""
    place = ((np.arange(target) + 0.5) * (1 / (target / extent)) - 0.5).astype(np.float32)
    low = np.floor(place)
    return low.astype(np.intp), place - low


def _weights(low: np.ndarray, share: np.ndarray, extent: int, shape: tuple[int, ...]) -> Weights:
    one = np.float32(1 << WEIGHT_BITS)
    low_weight, high_weight = np.rint((1 - share) * one), np.rint(share * one)
    clipped = np.clip(low, 0, extent - 1), np.clip(low + 1, 0, extent - 1)
    return (*clipped, low_weight.astype(np.int32).reshape(shape), high_weight.astype(np.int32).reshape(shape))


@dataclass(frozen=True, slots=True)
class RandomCrop:
    """Pad with zeros on every side, then cut a window out at a random place of each image."""

    height: int
    width: int
    padding: int = 0

    def __call__(self, images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """[B, H, W, C] -> [B, height, width, C]."""
        pad = self.padding
        padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        spare = padded.shape[1] - self.height, padded.shape[2] - self.width
        if min(spare) < 0:
            raise ConfigError(f"RandomCrop: {self.height}x{self.width} does not fit into {padded.shape[1]}x{padded.shape[2]} (padded).")
        tops, lefts = (rng.integers(0, room + 1, len(images)) for room in spare)
        windows = np.lib.stride_tricks.sliding_window_view(padded, (self.height, self.width), axis=(1, 2))  # [B, rows, columns, C, h, w]
        return np.ascontiguousarray(windows[np.arange(len(images)), tops, lefts].transpose(0, 2, 3, 1))


@dataclass(frozen=True, slots=True)
class RandomHorizontalFlip:
    """Mirror each image left to right with a probability."""

    probability: float = 0.5

    def __call__(self, images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """[B, H, W, C] -> [B, H, W, C]."""
        flipped = rng.random(len(images)) < self.probability
        result = images.copy()
        result[flipped] = images[flipped, :, ::-1]
        return result


@dataclass(frozen=True, slots=True)
class Rescale:
    """images * scale + shift in float32, as MindSpore's Rescale."""

    scale: float
    shift: float = 0.0

    def __call__(self, images: np.ndarray, rng: np.random.Generator | None = None) -> np.ndarray:
        """[...] -> float32 [...]."""
        result = images.astype(np.float32)
        result *= np.float32(self.scale)
        result += np.float32(self.shift)
        return result


@dataclass(frozen=True, slots=True)
class ToFloat:
    """Bytes divided by 255 in float32, as torchvision's ToTensor."""

    def __call__(self, images: np.ndarray, rng: np.random.Generator | None = None) -> np.ndarray:
        """uint8 [...] -> float32 [...] in 0..1."""
        result = images.astype(np.float32)
        result /= np.float32(255)
        return result


@dataclass(frozen=True, slots=True)
class Normalize:
    """(images - mean) / std, one of each a channel, in float32."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: np.ndarray, rng: np.random.Generator | None = None) -> np.ndarray:
        """[..., C] -> float32 [..., C]."""
        if not len(self.mean) == len(self.std) == images.shape[-1]:
            raise ConfigError(f"Normalize: {len(self.mean)} means and {len(self.std)} deviations for {images.shape[-1]} channels.")
        result = images.astype(np.float32)
        result -= np.asarray(self.mean, np.float32)
        result /= np.asarray(self.std, np.float32)
        return result


def apply(transforms: Sequence[Transform], images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The images after every transform in turn."""
    for transform in transforms:
        images = transform(images, rng)
    return images


LENET = (Resize(32, 32), Rescale(1 / 255), Rescale(1 / 0.3081, -0.1307 / 0.3081))
"""MNIST bytes for LeNet-5, as MindSpore's training guide has it; its order too."""

TUTORIAL = (ToFloat(), Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))
"""CIFAR-10 bytes to -1..1, as PyTorch's tutorial has it."""


def resnet_evaluation(side: int = 224) -> tuple[Transform, ...]:
    """CIFAR-10 bytes for ResNet, as MindSpore's mixed-precision guide has it (side 224)."""
    return (Resize(side, side), Rescale(1 / 255), Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)))


def resnet_training(side: int = 224) -> tuple[Transform, ...]:
    """The same after a random crop and flip."""
    return (RandomCrop(32, 32, padding=4), RandomHorizontalFlip(), *resnet_evaluation(side))
