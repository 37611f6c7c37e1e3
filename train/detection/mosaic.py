"""Four pictures put together at a random point: YOLOv5's mosaic; and two blended into one: mixup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from train.detection.pictures import GREY

MIXUP_BETA = 32.0


@dataclass(frozen=True, slots=True)
class Labelled:
    """A picture uint8 [H, W, 3] and its boxes: corners x1 y1 x2 y2 in pixels, float32 [N, 4], with classes int32 [N]."""

    image: np.ndarray
    boxes: np.ndarray
    classes: np.ndarray


def draw_centre(size: int, rng: np.random.Generator) -> tuple[int, int]:
    """(row, column) where the four meet, on a canvas of twice the size, at least half a size from its border."""
    return int(rng.uniform(size / 2, 1.5 * size)), int(rng.uniform(size / 2, 1.5 * size))


def mosaic(parts: Sequence[Labelled], centre: tuple[int, int], size: int) -> Labelled:
    """The four of them on a canvas [2 size, 2 size, 3], with a corner each at the centre: above left, above right, below left, below right.

    What of a picture lies beyond the canvas is cut off; boxes are cut at its border.
    """
    canvas = np.full((2 * size, 2 * size, 3), GREY, np.uint8)
    placed = [_place(canvas, part, centre, below=number // 2, right=number % 2) for number, part in enumerate(parts)]
    boxes = np.clip(np.concatenate(placed), 0, 2 * size)
    return Labelled(canvas, boxes, np.concatenate([part.classes for part in parts]))


def _place(canvas: np.ndarray, part: Labelled, centre: tuple[int, int], *, below: int, right: int) -> np.ndarray:
    """Paint one picture; its boxes on the canvas."""
    height, width = part.image.shape[:2]
    top = centre[0] if below else centre[0] - height
    left = centre[1] if right else centre[1] - width
    first_row, first_column = max(top, 0), max(left, 0)
    last_row, last_column = min(top + height, canvas.shape[0]), min(left + width, canvas.shape[1])
    canvas[first_row:last_row, first_column:last_column] = part.image[
        first_row - top : last_row - top, first_column - left : last_column - left
    ]
    return part.boxes + np.array([left, top, left, top], part.boxes.dtype)


def mixup(one: Labelled, other: Labelled, share: float) -> Labelled:
    """Both pictures, `share` of the one and the rest of the other, with the boxes of both."""
    image = (one.image * share + other.image * (1 - share)).astype(np.uint8)
    return Labelled(image, np.concatenate([one.boxes, other.boxes]), np.concatenate([one.classes, other.classes]))
