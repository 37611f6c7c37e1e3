"""Pictures as arrays, uint8 [H, W, 3] RGB: read, resized, letterboxed, turned in colour; OpenCV does the work on pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tpuflow.errors import DataError
from train.detection.opencv import opencv

GREY = (114, 114, 114)
"""The colour of what no picture covers, as in YOLOv5."""
SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})


@dataclass(frozen=True, slots=True)
class Letterboxed:
    """A picture in a frame: its pixels [H, W, 3], how it was scaled, and what is left of and above it in pixels (halves may occur)."""

    image: np.ndarray
    gain: float
    left: float
    above: float


def read(path: Path) -> np.ndarray:
    """A file's picture, upright as its EXIF says.

    Raises:
      DataError: it cannot be read.
    """
    cv2 = opencv()
    try:
        content = np.frombuffer(path.read_bytes(), np.uint8)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
    image = cv2.imdecode(content, cv2.IMREAD_COLOR) if content.size else None
    if image is None:
        raise DataError(f"{path}: no picture that OpenCV can decode; replace it or leave it out.")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


def fitted(image: np.ndarray, size: int, *, averaged: bool) -> np.ndarray:
    """The picture with its longer side of `size` pixels.

    averaged: shrink by averages over areas, as YOLOv5 does for evaluation, in place of bilinear samples, as for training.
    """
    height, width = image.shape[:2]
    ratio = size / max(height, width)
    if ratio == 1:
        return image
    cv2 = opencv()
    kind = cv2.INTER_AREA if averaged and ratio < 1 else cv2.INTER_LINEAR
    return cv2.resize(image, (math.ceil(width * ratio), math.ceil(height * ratio)), interpolation=kind)


def letterbox(image: np.ndarray, shape: tuple[int, int], *, minimal_stride: int | None = None, enlarge: bool = True) -> Letterboxed:
    """The picture in the middle of a grey frame of shape (height, width).

    minimal_stride: the frame is cut so that it is as small as multiples of this allow. enlarge: a small picture is scaled up.
    """
    cv2 = opencv()
    height, width = image.shape[:2]
    gain = min(shape[0] / height, shape[1] / width)
    gain = gain if enlarge else min(gain, 1.0)
    scaled = round(width * gain), round(height * gain)
    across, down = shape[1] - scaled[0], shape[0] - scaled[1]
    if minimal_stride is not None:
        across, down = across % minimal_stride, down % minimal_stride
    if (width, height) != scaled:
        image = cv2.resize(image, scaled, interpolation=cv2.INTER_LINEAR)
    left, above = across / 2, down / 2
    # An odd row or column goes below or to the right: -0.1 and +0.1 break the tie.
    rows, columns = (round(above - 0.1), round(above + 0.1)), (round(left - 0.1), round(left + 0.1))
    framed = cv2.copyMakeBorder(image, *rows, *columns, cv2.BORDER_CONSTANT, value=GREY)
    return Letterboxed(framed, gain, left, above)


def recoloured(image: np.ndarray, gains: np.ndarray) -> np.ndarray:
    """The picture with hue, saturation and value multiplied by gains float64 [3]; the hue goes round, the others stop at 255."""
    cv2 = opencv()
    levels = np.arange(256, dtype=gains.dtype)
    tables = (
        (levels * gains[0] % 180).astype(np.uint8),  # OpenCV's hue is in steps of two degrees
        np.clip(levels * gains[1], 0, 255).astype(np.uint8),
        np.clip(levels * gains[2], 0, 255).astype(np.uint8),
    )
    planes = cv2.split(cv2.cvtColor(image, cv2.COLOR_RGB2HSV))
    turned = [cv2.LUT(plane, table) for plane, table in zip(planes, tables, strict=True)]
    return cv2.cvtColor(cv2.merge(turned), cv2.COLOR_HSV2RGB)
