"""Batches of one shape for training: what batch number n is depends on the seed and n alone, so `train.pipeline.Loader` can walk over them.

A batch is a mapping: `images` uint8 [B, H, W, 3] RGB, `boxes` float32 [B, M, 4] (centre-x, centre-y, width, height as shares of the
frame), `classes` int32 [B, M], `valid` bool [B, M], False for rows that only fill up.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from tpuflow.errors import DataError
from train.detection.augmentation import Augmentation
from train.detection.dataset import DetectionSet
from train.detection.samples import Pictures, stacked, training_sample
from train.pipeline import shuffled
from train.ranges import check_positive

Batch = dict[str, np.ndarray]
PICTURES_IN_A_MOSAIC = 4


@dataclass(slots=True, eq=False)
class TrainingBatches:
    """Batches of changed pictures, each pass over the set in a new order; pictures that make no whole batch wait for another pass.

    size: side of the square frame in pixels. most_boxes: M; None for as many as a sample can have: those of the fullest picture, times 4
    where there are mosaics, times 8 where these are mixed. Where fewer are asked for and a sample has more, a warning names it, once, and
    `cut` counts the boxes left out.
    keep: hold decoded pictures in memory.
    """

    data: DetectionSet
    size: int
    batch_size: int
    augmentation: Augmentation = field(default_factory=Augmentation)
    seed: int = 0
    most_boxes: int | None = None
    keep: bool = False
    cut: int = field(default=0, init=False)
    pictures: Pictures = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_positive(self, ("size", "batch_size", "most_boxes"))
        if len(self.data.pictures) < self.batch_size:
            raise DataError(
                f"{self.data.split}: {len(self.data.pictures)} pictures make no batch of {self.batch_size}; give a smaller batch."
            )
        self.pictures = Pictures(self.data, self.size, keep=self.keep)

    @property
    def rows(self) -> int:
        """M: the rows of boxes that each sample has."""
        if self.most_boxes is not None:
            return self.most_boxes
        mosaics = PICTURES_IN_A_MOSAIC * (2 if self.augmentation.mixup else 1) if self.augmentation.mosaic else 1
        return mosaics * self.data.most_boxes

    def __len__(self) -> int:
        """Batches in a pass over the set."""
        return len(self.data.pictures) // self.batch_size

    def __getitem__(self, number: int) -> Batch:
        """Batch `number`, counted from the first one of the first pass."""
        if number < 0:
            raise IndexError(f"batches are numbered from 0, got {number}")
        walk, place = divmod(number, len(self))
        count, first = len(self.data.pictures), place * self.batch_size
        chosen = shuffled(count, count, self.seed, walk)[first : first + self.batch_size].tolist()
        samples = [
            # A third number of 0 would give the stream of the pass's order.
            training_sample(self.pictures, index, self.augmentation, np.random.default_rng((self.seed, walk, 1 + first + row)))
            for row, index in enumerate(chosen)
        ]
        for index, sample in zip(chosen, samples, strict=True):
            if len(sample.classes) > self.rows:
                self._note(index, len(sample.classes))
        return stacked(samples, self.rows)

    def identity(self) -> dict[str, Any]:
        """What gives the batches' numbers their meaning."""
        names = ("size", "batch_size", "seed")
        ours = {name: getattr(self, name) for name in names}
        transforms = {one.name: getattr(self.augmentation, one.name) for one in fields(Augmentation)}
        return {"samples": len(self.data.pictures), "boxes": self.data.boxes, "rows": self.rows, **ours, **transforms}

    def _note(self, index: int, boxes: int) -> None:
        if not self.cut:
            warnings.warn(
                f"{self.data.split}: the sample of {self.data.pictures[index].path} has {boxes} boxes, of which {self.rows} are used, as "
                f"most_boxes says; give up to {PICTURES_IN_A_MOSAIC * self.data.most_boxes} to use all. Later ones are counted in silence.",
                RuntimeWarning,
                stacklevel=2,
            )
        self.cut += boxes - self.rows
