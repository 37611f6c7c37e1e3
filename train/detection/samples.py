"""A training sample: a mosaic or a letterboxed picture, changed at random; every number is drawn from the sample's own generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from train.detection.augmentation import Augmentation
from train.detection.dataset import DetectionSet
from train.detection.mosaic import MIXUP_BETA, Labelled, draw_centre, mixup, mosaic
from train.detection.pictures import fitted, letterbox, read, recoloured
from train.detection.warping import draw_warp, warp

INSIDE = 1e-3
"""Corners are kept so many pixels inside of the border, as YOLOv5 does."""


@dataclass(slots=True, eq=False)
class Pictures:
    """The pictures of a set with their longer side of `size` pixels; `averaged` as in `fitted`.

    keep: hold the pixels in memory once they are read.
    """

    data: DetectionSet
    size: int
    averaged: bool = False
    keep: bool = False
    _kept: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False)

    def image(self, index: int) -> np.ndarray:
        """uint8 [H, W, 3]."""
        if index in self._kept:
            return self._kept[index]
        image = fitted(read(self.data.pictures[index].path), self.size, averaged=self.averaged)
        if self.keep:
            self._kept[index] = image
        return image

    def labelled(self, index: int) -> Labelled:
        """The picture with its boxes in its own pixels."""
        image, labels = self.image(index), self.data.pictures[index].labels
        return Labelled(image, in_pixels(labels.boxes, image.shape[1], image.shape[0]), labels.classes)


def in_pixels(boxes: np.ndarray, width: float, height: float, left: float = 0.0, above: float = 0.0) -> np.ndarray:
    """Boxes [N, 4] of centre and size in shares -> corners x1 y1 x2 y2 in pixels of a frame that the picture lies in."""
    x, y, half_width, half_height = boxes[:, 0], boxes[:, 1], boxes[:, 2] / 2, boxes[:, 3] / 2
    corners = (
        width * (x - half_width) + left,
        height * (y - half_height) + above,
        width * (x + half_width) + left,
        height * (y + half_height) + above,
    )
    return np.stack(corners, axis=1)


def in_shares(boxes: np.ndarray, width: int, height: int) -> np.ndarray:
    """Corners [N, 4] in pixels, cut at the border, -> centre and size as shares of width and height."""
    x1, x2 = (boxes[:, side].clip(0, width - INSIDE) for side in (0, 2))
    y1, y2 = (boxes[:, side].clip(0, height - INSIDE) for side in (1, 3))
    return np.stack([(x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height], axis=1)


def training_sample(pictures: Pictures, index: int, augmentation: Augmentation, rng: np.random.Generator) -> Labelled:
    """Picture `index` and what it is put together with: uint8 [size, size, 3], boxes of centre and size in shares float32 [N, 4]."""
    if rng.random() < augmentation.mosaic:
        sample = _mosaic(pictures, index, augmentation, rng)
        if rng.random() < augmentation.mixup:
            other = _mosaic(pictures, int(rng.integers(len(pictures.data.pictures))), augmentation, rng)
            sample = mixup(sample, other, rng.beta(MIXUP_BETA, MIXUP_BETA))
    else:
        sample = _alone(pictures, index, augmentation, rng)
    shares = in_shares(sample.boxes, pictures.size, pictures.size)
    image = recoloured(sample.image, rng.uniform(-1, 1, 3) * (augmentation.hsv_h, augmentation.hsv_s, augmentation.hsv_v) + 1)
    return flipped(
        replace(sample, image=image, boxes=shares),
        upside_down=rng.random() < augmentation.flipud,
        mirrored=rng.random() < augmentation.fliplr,
    )


def flipped(sample: Labelled, *, upside_down: bool, mirrored: bool) -> Labelled:
    """The picture turned over, with its boxes of centre and size in shares."""
    image, boxes = sample.image, sample.boxes.copy()
    if upside_down:
        image, boxes[:, 1] = image[::-1], 1 - boxes[:, 1]
    if mirrored:
        image, boxes[:, 0] = image[:, ::-1], 1 - boxes[:, 0]
    return replace(sample, image=image, boxes=boxes)


def _mosaic(pictures: Pictures, index: int, augmentation: Augmentation, rng: np.random.Generator) -> Labelled:
    size = pictures.size
    centre = draw_centre(size, rng)
    chosen = rng.permutation([index, *rng.integers(len(pictures.data.pictures), size=3)])
    return _warped(mosaic([pictures.labelled(one) for one in chosen.tolist()], centre, size), size, augmentation, rng)


def _alone(pictures: Pictures, index: int, augmentation: Augmentation, rng: np.random.Generator) -> Labelled:
    size, labels = pictures.size, pictures.data.pictures[index].labels
    image = pictures.image(index)
    framed = letterbox(image, (size, size))
    boxes = in_pixels(labels.boxes, framed.gain * image.shape[1], framed.gain * image.shape[0], framed.left, framed.above)
    return _warped(Labelled(framed.image, boxes, labels.classes), size, augmentation, rng)


def _warped(sample: Labelled, size: int, augmentation: Augmentation, rng: np.random.Generator) -> Labelled:
    image, boxes, kept = warp(sample.image, sample.boxes, draw_warp(augmentation, rng), (size, size))
    return Labelled(image, boxes, sample.classes[kept])


def stacked(samples: Sequence[Labelled], most_boxes: int) -> dict[str, np.ndarray]:
    """A batch: `images` uint8 [B, H, W, 3], `boxes` float32 [B, M, 4], `classes` int32 [B, M], `valid` bool [B, M], M = most_boxes.

    Of a sample with more boxes than that the first ones are taken.
    """
    boxes = np.zeros((len(samples), most_boxes, 4), np.float32)
    classes, valid = np.zeros(boxes.shape[:2], np.int32), np.zeros(boxes.shape[:2], bool)
    for row, sample in enumerate(samples):
        count = min(len(sample.classes), most_boxes)
        boxes[row, :count], classes[row, :count], valid[row, :count] = sample.boxes[:count], sample.classes[:count], True
    return {"images": np.stack([sample.image for sample in samples]), "boxes": boxes, "classes": classes, "valid": valid}
