"""What the evaluations in a training measure: detections on the device, their average precision on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import tpuflow
from models.yolov5 import decode
from models.yolov5_config import Config
from train.detection.average_precision import scores
from train.detection.batches import Batch
from train.detection.evaluation import in_picture, labels_of
from train.detection.evaluation_batches import EvaluationBatches, Placed
from train.detection.matching import right_at_thresholds
from train.detection.nms import VALIDATION, Detections, suppress

FITNESS = "fitness"
"""By which the best checkpoint is told."""


@dataclass(slots=True, eq=False)
class Frames:
    """The batches of an evaluation in the set's order, for a loader to walk over; where the pictures lie in them is noted on the way."""

    batches: EvaluationBatches
    _placed: dict[int, Placed] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        """Batches in a pass."""
        return len(self.batches)

    def __getitem__(self, number: int) -> Batch:
        """Batch `number`."""
        batch, placed = self.batches[number]
        self._placed |= {place.index: place for place in placed}
        return batch

    def identity(self) -> Mapping[str, Any]:
        """What gives the batches' numbers their meaning."""
        return self.batches.identity()

    def metric(self, config: Config) -> tpuflow.Metric:
        """Precision, recall, mAP50, mAP50-95 and fitness, as `evaluate` counts them."""

        def found(maps: Sequence[jax.Array], batch: Mapping[str, jax.Array]) -> Detections:
            return suppress(decode(maps, config), VALIDATION)

        return tpuflow.Metric("detections", found, summary=self.summary)

    def summary(self, found: Detections) -> dict[str, float]:
        """The figures of what was found in all frames, in the set's order; frames that fill up the last batch count for nothing."""
        data, right = self.batches.data, []
        for row in range(len(data.pictures)):
            one = in_picture(found, row, self._placed[row])
            right.append((right_at_thresholds(one, *labels_of(data, row)), one.scores, one.classes))
        hits, confidences, classes = (np.concatenate(part) for part in zip(*right, strict=True))
        made = scores(hits, confidences, classes, np.concatenate([picture.labels.classes for picture in data.pictures]))
        whole = {"precision": made.mean_precision, "recall": made.mean_recall, "mAP50": made.map50, "mAP50-95": made.map}
        return {**whole, FITNESS: made.fitness}
