"""Boxes drawn on pictures, and the pictures of a batch beside each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tpuflow.errors import ConfigError
from train.detection.batches import Batch
from train.detection.dataset import DetectionSet
from train.detection.evaluation_batches import Placed
from train.detection.matching import Found
from train.detection.nms import Detections
from train.detection.opencv import opencv
from train.detection.samples import in_pixels

MOST_PICTURES = 16
MOST_PIXELS = 1920
LEAST_DRAWN_SCORE = 0.25
COLOURS = (
    (230, 25, 75), (0, 130, 200), (60, 180, 75), (245, 130, 48), (145, 30, 180), (0, 160, 160), (240, 50, 230), (128, 128, 0), (0, 0, 128),
    (170, 110, 40), (128, 0, 0), (0, 90, 50), (90, 60, 160), (200, 160, 0), (70, 70, 70), (255, 105, 140), (0, 190, 255), (120, 200, 0),
)  # fmt: skip


def draw_boxes(image: np.ndarray, found: Found, names: Sequence[str], *, scored: bool = True, line: int | None = None) -> np.ndarray:
    """A copy of the picture uint8 [H, W, 3] with its boxes, each in its class's colour, with the name and, if `scored`, the score."""
    cv2, image = opencv(), np.ascontiguousarray(image).copy()
    line = line or max(round(sum(image.shape[:2]) / 2 * 0.003), 1)
    # The best is drawn last, so that its name covers others.
    for box, score, kind in zip(found.boxes[::-1], found.scores[::-1], found.classes[::-1], strict=True):
        (left, top, right, bottom), colour = (round(float(side)) for side in box), COLOURS[kind % len(COLOURS)]
        cv2.rectangle(image, (left, top), (right, bottom), colour, line, cv2.LINE_AA)
        _label(image, f"{names[kind]} {score:.2f}" if scored else str(names[kind]), (left, top), colour, line)
    return image


def draw_labels(batch: Batch, names: Sequence[str], titles: Sequence[str] = ()) -> np.ndarray:
    """The pictures of a batch with the boxes of their labels, beside each other."""
    height, width = batch["images"].shape[1:3]
    found = []
    for boxes, classes, valid in zip(batch["boxes"], batch["classes"], batch["valid"], strict=True):
        found.append(Found(in_pixels(boxes[valid], width, height), np.ones(int(valid.sum())), classes[valid]))
    return _grid(batch["images"], found, names, titles, scored=False)


def draw_detections(batch: Batch, detections: Detections, names: Sequence[str], titles: Sequence[str] = ()) -> np.ndarray:
    """The pictures of a batch with what was found in them by a score of more than 0.25, beside each other."""
    found = []
    for boxes, scores, classes, valid in zip(*detections, strict=True):
        shown = valid & (scores > LEAST_DRAWN_SCORE)
        found.append(Found(boxes[shown], scores[shown], classes[shown]))
    return _grid(batch["images"], found, names, titles, scored=True)


def titles_of(data: DetectionSet, placed: Sequence[Placed]) -> list[str]:
    """The names of the pictures' files."""
    return [data.pictures[place.index].path.name for place in placed]


def write_picture(path: Path, image: np.ndarray) -> None:
    """Write uint8 [H, W, 3] RGB by the file's ending.

    Raises:
      ConfigError: it cannot be written.
    """
    cv2 = opencv()
    try:
        path.write_bytes(cv2.imencode(path.suffix, cv2.cvtColor(image, cv2.COLOR_RGB2BGR))[1].tobytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}).") from error


def _grid(images: np.ndarray, found: Sequence[Found], names: Sequence[str], titles: Sequence[str], *, scored: bool) -> np.ndarray:
    """At most sixteen of them [B, H, W, 3], or as many as have titles, in a square, made smaller if it would be too large."""
    cv2, count = opencv(), min(len(titles) or len(images), MOST_PICTURES)
    side, (height, width) = math.ceil(math.sqrt(count)), images.shape[1:3]
    shrink = min(1.0, MOST_PIXELS / side / max(height, width))
    height, width = math.ceil(height * shrink), math.ceil(width * shrink)
    grid = np.full((side * height, side * width, 3), 255, np.uint8)
    for place in range(count):
        image = images[place] if shrink == 1 else cv2.resize(images[place], (width, height), interpolation=cv2.INTER_AREA)
        small = Found(found[place].boxes * shrink, found[place].scores, found[place].classes)
        image = draw_boxes(image, small, names, scored=scored, line=1)
        if titles:
            _label(image, titles[place][:40], (0, 12), (60, 60, 60), 1)
        row, column = divmod(place, side)
        grid[row * height : (row + 1) * height, column * width : (column + 1) * width] = image
    return grid


def _label(image: np.ndarray, text: str, corner: tuple[int, int], colour: tuple[int, int, int], line: int) -> None:
    """White text on the colour, above the corner, or below where there is no room."""
    cv2, scale, thick = opencv(), max(line / 3, 0.33), max(line - 1, 1)
    (width, height), _ = cv2.getTextSize(text, 0, scale, thick)
    left = min(max(corner[0], 0), max(image.shape[1] - width, 0))
    bottom = corner[1] if corner[1] > height + 3 else corner[1] + height + 3
    cv2.rectangle(image, (left, bottom - height - 3), (left + width, bottom), colour, -1, cv2.LINE_AA)
    cv2.putText(image, text, (left, bottom - 2), 0, scale, (255, 255, 255), thick, cv2.LINE_AA)
