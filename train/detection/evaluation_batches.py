"""Batches for evaluation: pictures as they are, those of like shape together, in frames with as little grey as the stride allows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.yolov5_config import Config
from tpuflow.errors import ConfigError
from train.detection.batches import Batch
from train.detection.dataset import DetectionSet
from train.detection.mosaic import Labelled
from train.detection.options import check_size
from train.detection.pictures import GREY, letterbox
from train.detection.samples import Pictures, in_pixels, in_shares, stacked
from train.ranges import check_positive

PAD_STRIDES = 0.5


def stride_for(config: Config, size: int) -> int:
    """A network's coarsest stride, of which the side of frames is a multiple.

    Raises:
      ConfigError: `size` is none.
    """
    stride = config.strides[-1]
    check_size(size, stride)
    return stride


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a picture of the set lies in its frame: its pixel (x, y) is at (x * gains[0] + left, y * gains[1] + above).

    The gains differ where its shorter side was rounded to whole pixels.
    """

    index: int
    width: int
    height: int
    gains: tuple[float, float]
    left: float
    above: float

    def in_picture(self, boxes: np.ndarray) -> np.ndarray:
        """Corners [N, 4] in pixels of the frame -> in those of the picture, cut at its border."""
        moved = (boxes - np.array([self.left, self.above] * 2, boxes.dtype)) / np.array(self.gains * 2, boxes.dtype)
        return moved.clip(0, np.array([self.width, self.height] * 2, boxes.dtype))


@dataclass(slots=True, eq=False)
class EvaluationBatches:
    """Every picture of a set once; a last batch that is not full is filled with grey frames, which have no place in `placed`.

    rectangular: batches go by aspect ratio, the frame's longer side is about `size` pixels, the other as short as the pictures of the
    batch allow, both multiples of the stride with half a stride of grey around; otherwise frames are squares of `size`, in the set's order.
    """

    data: DetectionSet
    size: int
    batch_size: int
    stride: int = 32
    rectangular: bool = True
    _pictures: Pictures = field(init=False, repr=False)
    _order: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_positive(self, ("batch_size",))
        if self.size < self.stride or self.size % self.stride:
            raise ConfigError(f"size: expected a multiple of the network's stride {self.stride}, got {self.size}.")
        self._pictures = Pictures(self.data, self.size, averaged=True)
        aspects = np.array([picture.height / picture.width for picture in self.data.pictures])
        self._order = aspects.argsort(kind="stable") if self.rectangular else np.arange(len(aspects))

    def __len__(self) -> int:
        """Batches in all."""
        return -(-len(self._order) // self.batch_size)

    def shape(self, number: int) -> tuple[int, int]:
        """Height and width of a batch's frames."""
        if not self.rectangular:
            return self.size, self.size
        aspects = [self.data.pictures[index].height / self.data.pictures[index].width for index in self._chosen(number)]
        least, most = min(aspects), max(aspects)
        height, width = (most, 1.0) if most < 1 else (1.0, 1 / least) if least > 1 else (1.0, 1.0)
        return self._strides(height), self._strides(width)

    def _strides(self, share: float) -> int:
        return int(np.ceil(share * self.size / self.stride + PAD_STRIDES)) * self.stride

    def _chosen(self, number: int) -> list[int]:
        return self._order[number * self.batch_size : (number + 1) * self.batch_size].tolist()

    def __getitem__(self, number: int) -> tuple[Batch, tuple[Placed, ...]]:
        """(batch `number`, where each of its pictures lies in its frame); after the last comes the first again."""
        number %= len(self)  # a walk that begins anew
        shape = self.shape(number)
        found = [self._framed(index, shape) for index in self._chosen(number)]
        blank = Labelled(np.full((*shape, 3), GREY, np.uint8), np.zeros((0, 4), np.float32), np.zeros(0, np.int32))
        samples = [sample for sample, _ in found] + [blank] * (self.batch_size - len(found))
        return stacked(samples, self.data.most_boxes), tuple(place for _, place in found)

    def identity(self) -> dict[str, Any]:
        """What gives the batches' numbers their meaning."""
        names = ("size", "batch_size", "stride", "rectangular")
        return {"samples": len(self.data.pictures), **{name: getattr(self, name) for name in names}}

    def _framed(self, index: int, shape: tuple[int, int]) -> tuple[Labelled, Placed]:
        picture, image = self.data.pictures[index], self._pictures.image(index)
        framed = letterbox(image, shape, enlarge=False)
        height, width = image.shape[:2]
        boxes = in_pixels(picture.labels.boxes, framed.gain * width, framed.gain * height, framed.left, framed.above)
        gains = framed.gain * width / picture.width, framed.gain * height / picture.height
        place = Placed(index, picture.width, picture.height, gains, framed.left, framed.above)
        return Labelled(framed.image, in_shares(boxes, shape[1], shape[0]), picture.labels.classes), place
