"""What detection is held against: frames and mosaics pixel by pixel, suppression and average precision as plain loops, all for few data."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

GREY = 114


def letterboxed(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """A picture in the middle of a frame, an odd pixel of grey after it: each pixel of the frame is looked up by itself."""
    ratio = min(height / image.shape[0], width / image.shape[1])
    wide, high = round(image.shape[1] * ratio), round(image.shape[0] * ratio)
    small = cv2.resize(image, (wide, high)) if (high, wide) != image.shape[:2] else image
    first_row, first_column = (height - high) // 2, (width - wide) // 2
    frame = np.zeros((height, width, 3), np.uint8)
    for row in range(height):
        for column in range(width):
            y, x = row - first_row, column - first_column
            frame[row, column] = small[y, x] if 0 <= y < high and 0 <= x < wide else GREY
    return frame


def mosaic(images: Sequence[np.ndarray], row: int, column: int, size: int) -> np.ndarray:
    """Four pictures around a point: each pixel of the canvas is looked up in the picture of its quarter."""
    canvas = np.full((2 * size, 2 * size, 3), GREY, np.uint8)
    for y in range(2 * size):
        for x in range(2 * size):
            image = images[2 * (y >= row) + (x >= column)]
            inner_y = y - row if y >= row else image.shape[0] - (row - y)
            inner_x = x - column if x >= column else image.shape[1] - (column - x)
            if 0 <= inner_y < image.shape[0] and 0 <= inner_x < image.shape[1]:
                canvas[y, x] = image[inner_y, inner_x]
    return canvas


def overlap(a: np.ndarray, b: np.ndarray) -> np.float32:
    """Intersection over union of two boxes x1 y1 x2 y2, in fp32."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, np.float32(0)) * max(height, np.float32(0))
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def suppressed(
    predictions: np.ndarray,
    confidence: float,
    iou: float,
    most: int,
    candidates: int,
    *,
    several: bool,
    agnostic: bool,
    classes: Sequence[int] | None,
) -> list[tuple[np.ndarray, np.float32, int]]:
    """(box, score, class) of one picture's predictions [N, 5 + C], best first."""
    found = []
    for x, y, width, height, objectness, *kinds in predictions:
        half_width, half_height = width / 2, height / 2
        box = np.array([x - half_width, y - half_height, x + half_width, y + half_height], np.float32)
        scores = [objectness * kind for kind in kinds]
        for number, score in enumerate(scores):
            if score > confidence and (several or number == int(np.argmax(scores))) and (classes is None or number in classes):
                found.append((box, score, number))
    found = sorted(found, key=lambda one: -one[1])[:candidates]
    kept: list[tuple[np.ndarray, np.float32, int]] = []
    for box, score, number in found:
        apart = np.float32(0 if agnostic else 7680)
        if all(overlap(box + apart * number, other + apart * kind) <= np.float32(iou) for other, _, kind in kept):
            kept.append((box, score, number))
    return kept[:most]


def right(detections: Sequence[tuple[np.ndarray, float, int]], labels: Sequence[tuple[np.ndarray, int]], threshold: float) -> list[bool]:
    """Of one picture's detections, best first, which stand for a label: each goes to its nearest label of the class, one for each label."""
    taken: set[int] = set()
    answers = []
    for box, _, kind in detections:
        near = [(overlap(label, box), number) for number, (label, of) in enumerate(labels) if of == kind]
        value, number = max(near, default=(-1.0, -1))
        answers.append(value >= threshold and number not in taken)
        if value >= threshold:
            taken.add(number)
    return answers


def average_precision(hits: Sequence[bool], labels: int) -> float:
    """Of a class's detections, best first: the mean height of the precision envelope between 101 recalls, by the trapezoidal rule."""
    points, good = [(0.0, 1.0)], 0
    for count, hit in enumerate(hits, 1):
        good += hit
        points.append((good / labels, good / count))
    points.append((1.0, 0.0))
    heights = [max(precision for _, precision in points[place:]) for place in range(len(points))]
    recalls = [recall for recall, _ in points]
    curve = np.interp(np.linspace(0, 1, 101), recalls, heights)
    return float(sum((curve[:-1] + curve[1:]) / 2) / 100)
