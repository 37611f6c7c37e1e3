"""Which detections are right: each is held against the labels of its picture, at ten thresholds of overlap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""COCO's thresholds of intersection over union."""


@dataclass(frozen=True, slots=True)
class Found:
    """Detections of one picture in its own pixels: corners float32 [D, 4], scores float32 [D], classes int32 [D], best first."""

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray


def overlaps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Intersection over union of boxes [N, 4] and [M, 4], corners: [N, M]; 0 for boxes without area."""
    first, last = np.maximum(a[:, None, :2], b[None, :, :2]), np.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = np.prod(np.clip(last - first, 0, None), axis=2)
    areas = [np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) for boxes in (a, b)]
    union = areas[0][:, None] + areas[1][None] - shared
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def right_at_thresholds(found: Found, boxes: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """bool [D, 10] for labels with corners [L, 4] and classes [L]: whether a detection is the one of a label at each threshold.

    A detection stands for the label of its class that it overlaps most; of several that stand for one label the best score counts. As in
    YOLOv5, a detection whose label goes to a better one does not move on to another label.
    """
    overlap = overlaps(boxes, found.boxes)
    overlap = np.where(classes[:, None] == found.classes[None], overlap, -1.0)
    right = np.zeros((len(found.scores), len(THRESHOLDS)), bool)
    for place, threshold in enumerate(THRESHOLDS):
        right[pairs(np.where(overlap >= threshold, overlap, -1.0))[1], place] = True
    return right


def pairs(overlap: np.ndarray, *, nearest_first: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(labels, detections) that belong together by overlap [L, D], where no pair is possible at a negative one: each at most once.

    Each detection goes to the label that it overlaps most, and a label to the first detection; to the nearest if `nearest_first`.
    """
    if not overlap.size:
        return np.zeros(0, np.intp), np.zeros(0, np.intp)
    # Of equally near labels the last, as a sort turned round has it.
    nearest, most = len(overlap) - 1 - overlap[::-1].argmax(axis=0), overlap.max(axis=0)
    detections = np.flatnonzero(most >= 0)
    if nearest_first:
        detections = detections[np.argsort(-most[detections], kind="stable")]
    labels, first = np.unique(nearest[detections], return_index=True)
    return labels, detections[first]
