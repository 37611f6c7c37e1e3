"""A network held against the labels of a set: every picture once, detections matched, figures counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from train.detection.average_precision import Scores, scores
from train.detection.batches import Batch
from train.detection.confusion import ConfusionMatrix
from train.detection.dataset import DetectionSet
from train.detection.evaluation_batches import EvaluationBatches, Placed
from train.detection.matching import Found, right_at_thresholds
from train.detection.nms import Detections
from train.detection.samples import in_pixels
from train.pipeline import Loader

Predict = Callable[[Batch], tuple[Detections, np.ndarray | None]]
Watch = Callable[[int, Batch, Sequence[Placed], Detections], None]
"""Called with each batch's number, the batch, where its pictures lie, and what was found in it."""


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """What was found in each picture (by its number in the set), how right it was, and the mean losses float64 [3], if computed."""

    data: DetectionSet
    found: Mapping[int, Found]
    scores: Scores
    confusion: ConfusionMatrix
    losses: np.ndarray | None

    def table(self) -> str:
        """The lines that YOLOv5 prints: all classes, then each that has labels."""
        mine, names = self.scores, self.data.names
        with_class = [sum((picture.labels.classes == kind).any() for picture in self.data.pictures) for kind in mine.classes]
        head = f"{'Class':>22}" + "".join(f"{name:>11}" for name in ("Images", "Instances", "P", "R", "mAP50", "mAP50-95"))
        whole = (mine.mean_precision, mine.mean_recall, mine.map50, mine.map)
        rows = [_line("all", len(self.data.pictures), int(mine.labels.sum()), whole)]
        for row, kind in enumerate(mine.classes):
            figures = (mine.precision[row], mine.recall[row], mine.ap[row, 0], mine.ap[row].mean())
            rows.append(_line(names[kind], with_class[row], int(mine.labels[row]), figures))
        return "\n".join([head, *rows])


def evaluate(predict: Predict, batches: EvaluationBatches, *, threads: int = 2, watch: Watch | None = None) -> Evaluation:
    """Every picture of the batches' set through `predict`; boxes are compared in the pixels of the picture itself.

    The losses are the mean over the batches; grey frames that fill up the last one take part in its loss.
    """
    data, confusion = batches.data, ConfusionMatrix(len(batches.data.names))
    found: dict[int, Found] = {}
    losses, right = [], []
    for number, (batch, placed) in enumerate(Loader(batches, threads=threads)):
        detections, loss = predict(batch)
        if watch is not None:
            watch(number, batch, placed, detections)
        losses.append(loss)
        for row, place in enumerate(placed):
            one, (boxes, classes) = in_picture(detections, row, place), labels_of(data, place.index)
            found[place.index] = one
            right.append((right_at_thresholds(one, boxes, classes), one.scores, one.classes))
            confusion.add(one, boxes, classes)
    labels = np.concatenate([picture.labels.classes for picture in data.pictures])
    hits, confidences, classes = (np.concatenate(part) for part in zip(*right, strict=True))
    mean = None if losses[0] is None else np.stack(losses).mean(axis=0, dtype=np.float64)
    return Evaluation(data, found, scores(hits, confidences, classes, labels), confusion, mean)


def in_picture(detections: Detections, row: int, place: Placed) -> Found:
    """What was found in one frame of a batch, in pixels of the picture that lies there."""
    count = int(detections.valid[row].sum())
    boxes = place.in_picture(np.asarray(detections.boxes[row, :count]))
    return Found(boxes, np.asarray(detections.scores[row, :count]), np.asarray(detections.classes[row, :count]))


def labels_of(data: DetectionSet, index: int) -> tuple[np.ndarray, np.ndarray]:
    """(corners float32 [L, 4] in pixels, classes int32 [L]) of a picture's labels."""
    picture = data.pictures[index]
    return in_pixels(picture.labels.boxes, picture.width, picture.height), picture.labels.classes


def _line(name: str, images: int, instances: int, figures: Sequence[float]) -> str:
    return f"{name:>22}{images:>11}{instances:>11}" + "".join(f"{figure:>11.3g}" for figure in figures)
