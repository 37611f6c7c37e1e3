"""The confusion matrix of detections and labels."""

from __future__ import annotations

import numpy as np

from train.detection.matching import Found, overlaps, pairs

LEAST_SCORE = 0.25
LEAST_OVERLAP = 0.45


class ConfusionMatrix:
    """counts int64 [C + 1, C + 1]: row the detected class, column the label's; the last row and column are the background.

    A detection below a score of 0.25 is none; one of any class stands for the label that it overlaps most, by more than 0.45, and which it
    overlaps more than others do. These are YOLOv5's numbers.
    """

    def __init__(self, classes: int):
        self.counts = np.zeros((classes + 1, classes + 1), np.int64)

    def add(self, found: Found, boxes: np.ndarray, classes: np.ndarray) -> None:
        """Count one picture: its detections, its labels' corners [L, 4] and classes [L]."""
        background, chosen = len(self.counts) - 1, found.scores > LEAST_SCORE
        detected = found.classes[chosen]
        overlap = overlaps(boxes, found.boxes[chosen])
        labels, detections = pairs(np.where(overlap > LEAST_OVERLAP, overlap, -1.0), nearest_first=True)
        np.add.at(self.counts, (detected[detections], classes[labels]), 1)
        np.add.at(self.counts[background], np.delete(classes, labels), 1)
        np.add.at(self.counts[:, background], np.delete(detected, detections), 1)

    def shares(self) -> np.ndarray:
        """The counts over those of each column: what became of a class's labels; NaN where there are none."""
        totals = self.counts.sum(0, keepdims=True)
        return np.divide(self.counts, totals, out=np.full(self.counts.shape, np.nan), where=totals > 0)
