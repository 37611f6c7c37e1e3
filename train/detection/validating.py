"""What the evaluations in a training measure: detections on the device, their average precision on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

import tpuflow
from models.yolov5 import decode
from models.yolov5_config import Config
from train.detection.average_precision import scores
from train.detection.matching import Found, right_at_thresholds
from train.detection.nms import VALIDATION, suppress
from train.detection.samples import in_pixels

FITNESS = "fitness"
"""By which the best checkpoint is told."""


def detection_metric(config: Config, size: int, pictures: int) -> tpuflow.Metric:
    """Precision, recall, mAP50, mAP50-95 and fitness of batches in square frames of `size` pixels; of the first so many pictures of them.

    Boxes are compared in the frames, which for a picture of one scale is the same as in its own pixels.
    """

    def found(maps: Sequence[jax.Array], batch: Mapping[str, jax.Array]) -> dict[str, Any]:
        detections = suppress(decode(maps, config), VALIDATION)
        return {"found": detections._asdict(), **{name: batch[name] for name in ("boxes", "classes", "valid")}}

    return tpuflow.Metric("detections", found, summary=lambda samples: summary(samples, size, pictures))


def summary(samples: Mapping[str, Any], size: int, pictures: int) -> dict[str, float]:
    """The figures of samples [N, ...], of which the first `pictures` count; the others are frames that fill up a batch."""
    right, labels = [], []
    for number in range(pictures):
        one, boxes, classes = _picture(samples, number, size)
        right.append((right_at_thresholds(one, boxes, classes), one.scores, one.classes))
        labels.append(classes)
    hits, confidences, kinds = (np.concatenate(part) for part in zip(*right, strict=True))
    made = scores(hits, confidences, kinds, np.concatenate(labels))
    return {
        "precision": made.mean_precision, "recall": made.mean_recall, "mAP50": made.map50, "mAP50-95": made.map, FITNESS: made.fitness,
    }  # fmt: skip


def _picture(samples: Mapping[str, Any], number: int, size: int) -> tuple[Found, np.ndarray, np.ndarray]:
    """(what was found, corners [L, 4] of its labels, their classes [L]) of one sample."""
    found, valid = samples["found"], samples["valid"][number]
    count = int(found["valid"][number].sum())
    one = Found(*(found[name][number, :count] for name in ("boxes", "scores", "classes")))
    return one, in_pixels(samples["boxes"][number][valid], size, size), samples["classes"][number][valid]
