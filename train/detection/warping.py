"""Random projections of a picture and of the boxes in it: rotation, scale, shear, translation, perspective."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from train.detection.augmentation import Augmentation
from train.detection.opencv import opencv
from train.detection.pictures import GREY

LEAST_SIDE_PIXELS = 2
LEAST_AREA_SHARE = 0.1
MOST_ASPECT = 100
TINY = 1e-16
CORNERS = (0, 1, 2, 3, 0, 3, 2, 1)
"""Of a box x1 y1 x2 y2: its four corners as x y pairs."""


@dataclass(frozen=True, slots=True)
class Warp:
    """What is drawn for one projection; `shift` is where the middle of the picture goes, as shares of the new width and height."""

    perspective: tuple[float, float] = (0.0, 0.0)
    degrees: float = 0.0
    scale: float = 1.0
    shear_degrees: tuple[float, float] = (0.0, 0.0)
    shift: tuple[float, float] = (0.5, 0.5)

    def matrix(self, old: tuple[int, int], new: tuple[int, int]) -> np.ndarray:
        """The projection, float64 [3, 3], of a picture of shape (height, width) to one of another shape."""
        centre, projection, rotation, shear, shift = (np.eye(3) for _ in range(5))
        centre[:2, 2] = -old[1] / 2, -old[0] / 2
        projection[2, :2] = self.perspective
        rotation[:2] = opencv().getRotationMatrix2D(angle=self.degrees, center=(0, 0), scale=self.scale)
        shear[0, 1], shear[1, 0] = (math.tan(angle * math.pi / 180) for angle in self.shear_degrees)
        shift[:2, 2] = self.shift[0] * new[1], self.shift[1] * new[0]
        return shift @ shear @ rotation @ projection @ centre


def draw_warp(augmentation: Augmentation, rng: np.random.Generator) -> Warp:
    """A projection within the limits; every number is drawn, whether its limit is 0 or not."""

    def pair(middle: float, most: float) -> tuple[float, float]:
        return float(rng.uniform(middle - most, middle + most)), float(rng.uniform(middle - most, middle + most))

    return Warp(
        perspective=pair(0.0, augmentation.perspective),
        degrees=float(rng.uniform(-augmentation.degrees, augmentation.degrees)),
        scale=float(rng.uniform(1 - augmentation.scale, 1 + augmentation.scale)),
        shear_degrees=pair(0.0, augmentation.shear),
        shift=pair(0.5, augmentation.translate),
    )


def warp(image: np.ndarray, boxes: np.ndarray, chosen: Warp, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(picture uint8 [H, W, 3] of that shape, boxes float32 [K, 4], which of the old ones they are [K]): corners in pixels, x1 y1 x2 y2.

    A box becomes the upright one around its projected corners, cut at the border. One is left out that is then no more than 2 pixels
    wide or high, has less than a tenth of its area, or is a hundred times as long as wide.
    """
    matrix = chosen.matrix(image.shape[:2], shape)
    projective = chosen.perspective != (0.0, 0.0)
    if image.shape[:2] != shape or (matrix != np.eye(3)).any():
        image = _warped(image, matrix, shape, projective=projective)
    if not len(boxes):
        return image, boxes, np.zeros(0, np.intp)
    moved = _moved(boxes, matrix, shape, projective=projective)
    kept = np.flatnonzero(_worth_keeping(boxes * chosen.scale, moved))
    return image, moved[kept].astype(np.float32), kept


def _warped(image: np.ndarray, matrix: np.ndarray, shape: tuple[int, int], *, projective: bool) -> np.ndarray:
    cv2, size = opencv(), (shape[1], shape[0])
    if projective:
        return cv2.warpPerspective(image, matrix, dsize=size, borderValue=GREY)
    return cv2.warpAffine(image, matrix[:2], dsize=size, borderValue=GREY)


def _moved(boxes: np.ndarray, matrix: np.ndarray, shape: tuple[int, int], *, projective: bool) -> np.ndarray:
    """float64 [N, 4]."""
    corners = np.ones((len(boxes) * 4, 3))
    corners[:, :2] = boxes[:, CORNERS].reshape(-1, 2)
    corners = corners @ matrix.T
    flat = corners[:, :2] / corners[:, 2:3] if projective else corners[:, :2]
    points = flat.reshape(-1, 4, 2)  # [N, 4 corners, x y]
    found = np.concatenate([points.min(1), points.max(1)], axis=1)
    return np.clip(found, 0, (shape[1], shape[0], shape[1], shape[0]))


def _worth_keeping(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    old_width, old_height = old[:, 2] - old[:, 0], old[:, 3] - old[:, 1]
    width, height = new[:, 2] - new[:, 0], new[:, 3] - new[:, 1]
    aspect = np.maximum(width / (height + TINY), height / (width + TINY))
    large = (width > LEAST_SIDE_PIXELS) & (height > LEAST_SIDE_PIXELS)
    return large & (width * height / (old_width * old_height + TINY) > LEAST_AREA_SHARE) & (aspect < MOST_ASPECT)
