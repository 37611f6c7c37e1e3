"""Precision, recall and average precision of each class, as YOLOv5 counts them: AP over COCO's 101 recalls, the rest at the best F1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RECALLS = np.linspace(0, 1, 101)
CONFIDENCES = np.linspace(0, 1, 1000)
TINY = 1e-16
SMOOTHED_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Curves:
    """Of each class that has labels, at the 1000 confidences: precision, recall, F1 [K, 1000]; precision at the 1000 recalls at IoU 0.5."""

    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    precision_at_recall: np.ndarray


@dataclass(frozen=True, slots=True)
class Scores:
    """The figures of the classes that have labels, in the order of `classes` [K].

    labels: how many labels [K]. precision, recall, f1, true_positives, false_positives [K]: at `confidence`, where the classes' mean of F1
    is highest. ap: average precision [K, 10] at the thresholds of overlap 0.5 to 0.95.
    """

    classes: np.ndarray
    labels: np.ndarray
    confidence: float
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    true_positives: np.ndarray
    false_positives: np.ndarray
    ap: np.ndarray
    curves: Curves

    @property
    def mean_precision(self) -> float:
        """Over the classes, as the following."""
        return _mean(self.precision)

    @property
    def mean_recall(self) -> float:
        """Of the classes."""
        return _mean(self.recall)

    @property
    def map50(self) -> float:
        """Mean average precision at an overlap of 0.5."""
        return _mean(self.ap[:, 0])

    @property
    def map(self) -> float:
        """Mean average precision over the ten overlaps from 0.5 to 0.95."""
        return _mean(self.ap)

    @property
    def fitness(self) -> float:
        """By which YOLOv5 tells the best checkpoint: a tenth of mAP at 0.5 and nine tenths of the mean."""
        return 0.1 * self.map50 + 0.9 * self.map


def scores(right: np.ndarray, confidences: np.ndarray, classes: np.ndarray, labels: np.ndarray) -> Scores:
    """Of all detections, bool [D, 10] (`right_at_thresholds`), scores [D], classes [D], and the classes of all labels [L]."""
    order = np.argsort(-confidences, kind="stable")
    right, confidences, classes = right[order], confidences[order], classes[order]
    kinds, counts = np.unique(labels, return_counts=True)
    precision, recall, at_recall = (np.zeros((len(kinds), len(CONFIDENCES))) for _ in range(3))
    ap = np.zeros((len(kinds), right.shape[1]))
    for row, (kind, count) in enumerate(zip(kinds, counts, strict=True)):
        ours = classes == kind
        if not ours.any():
            continue
        hits = right[ours].cumsum(0)  # [D of the class, 10]
        recalls, precisions = hits / (count + TINY), hits / np.arange(1, len(hits) + 1)[:, None]
        recall[row] = np.interp(-CONFIDENCES, -confidences[ours], recalls[:, 0], left=0)
        precision[row] = np.interp(-CONFIDENCES, -confidences[ours], precisions[:, 0], left=1)
        for column in range(ap.shape[1]):
            curve = envelope(recalls[:, column], precisions[:, column])
            ap[row, column] = np.trapezoid(np.interp(RECALLS, *curve), RECALLS)
            at_recall[row] = np.interp(CONFIDENCES, *curve) if column == 0 else at_recall[row]
    f1 = 2 * precision * recall / (precision + recall + TINY)
    return _at_best_f1(kinds, counts, ap, Curves(precision, recall, f1, at_recall))


def envelope(recall: Sequence[float] | np.ndarray, precision: Sequence[float] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The curve (recalls, precisions) from (0, 1) to (1, 0) whose precision at a recall is the highest at that or any higher recall."""
    recalls = np.concatenate([[0.0], recall, [1.0]])
    precisions = np.concatenate([[1.0], precision, [0.0]])
    return recalls, np.maximum.accumulate(precisions[::-1])[::-1]


def smoothed(values: np.ndarray, share: float) -> np.ndarray:
    """Means over a window of twice that share of the values [N], their ends repeated beyond."""
    width = round(len(values) * share * 2) // 2 + 1
    padded = np.concatenate([np.full(width // 2, values[0]), values, np.full(width // 2, values[-1])])
    return np.convolve(padded, np.full(width, 1 / width), mode="valid")


def _at_best_f1(kinds: np.ndarray, counts: np.ndarray, ap: np.ndarray, curves: Curves) -> Scores:
    best = int(smoothed(curves.f1.mean(0), SMOOTHED_SHARE).argmax()) if len(kinds) else 0
    precision, recall, f1 = (curve[:, best] for curve in (curves.precision, curves.recall, curves.f1))
    hits = (recall * counts).round()
    misses = (hits / (precision + TINY) - hits).round()
    return Scores(kinds, counts, float(CONFIDENCES[best]), precision, recall, f1, hits, misses, ap, curves)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0
