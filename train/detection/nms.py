"""Non-maximum suppression on the device: fixed shapes, one loop that takes the best box left and strikes out what overlaps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpuflow.errors import ConfigError
from train.detection.boxes import xywh_to_xyxy

CLASS_OFFSET_PIXELS = 7680.0
"""Boxes of other classes are put so far apart that they never overlap; YOLOv5's number, larger than any picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suppression:
    """How detections are chosen; defaults are those of YOLOv5's detection, `VALIDATION` has those of its evaluation.

    confidence: the least score. iou: boxes of a class that overlap more than this are one. most: detections a picture. candidates: the
    best so many take part. several: a box is of every class that scores enough, not only of the best. agnostic: boxes of different classes
    suppress each other. classes: which ones are wanted, None for all; a box of another best class is not taken for one of
    these.
    """

    confidence: float = 0.25
    iou: float = 0.45
    most: int = 1000
    candidates: int = 30000
    several: bool = False
    agnostic: bool = False
    classes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for what is out of its range."""
        for name in ("confidence", "iou"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}: expected 0 to 1, got {getattr(self, name)!r}.")
        for name in ("most", "candidates"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected 1 or more, got {getattr(self, name)!r}.")


VALIDATION = Suppression(confidence=0.001, iou=0.6, most=300, several=True)


class Detections(NamedTuple):
    """Of each picture, best first: boxes float32 [B, D, 4], corners in pixels; scores float32, classes int32, valid bool [B, D].

    Arrays of JAX, or of NumPy once they have left the device.
    """

    boxes: Any
    scores: Any
    classes: Any
    valid: Any


class _Candidates(NamedTuple):
    """What takes part: boxes float32 [B, 4, K], so that the device's lanes lie along K; scores float32 and classes int32 [B, K]."""

    boxes: jax.Array
    scores: jax.Array
    classes: jax.Array


def suppress(predictions: jax.Array, options: Suppression = VALIDATION) -> Detections:
    """Detections of predictions [B, N, 5 + classes]: boxes x y w h in pixels, objectness and classes' scores from 0 to 1.

    A score is objectness times the class's; of equal ones the first comes first. Where fewer than `most` boxes are found, the rest of the
    rows is 0 with valid False. What YOLOv5's non_max_suppression gives, greedy suppression as torchvision's nms.
    """
    candidates = _candidates(predictions.astype(jnp.float32), options)
    offsets = jnp.zeros_like(candidates.scores) if options.agnostic else candidates.classes * CLASS_OFFSET_PIXELS
    order, scores = _greedy(candidates.boxes + offsets[:, None], candidates.scores, options)
    valid = scores > -jnp.inf
    boxes = jnp.take_along_axis(candidates.boxes, order[:, None], axis=2).transpose(0, 2, 1)  # [B, 4, D] -> [B, D, 4]
    classes = jnp.take_along_axis(candidates.classes, order, axis=1)
    return Detections(jnp.where(valid[..., None], boxes, 0), jnp.where(valid, scores, 0), jnp.where(valid, classes, 0), valid)


def _candidates(predictions: jax.Array, options: Suppression) -> _Candidates:
    corners = xywh_to_xyxy(predictions[..., :4]).transpose(0, 2, 1)  # [B, 4, N]
    scores = predictions[..., 5:] * predictions[..., 4:5]  # [B, N, C]
    batch, boxes, kinds = scores.shape
    if options.several and kinds > 1:
        classes = jnp.broadcast_to(jnp.arange(kinds, dtype=jnp.int32), scores.shape).reshape(batch, -1)
        corners = jnp.broadcast_to(corners[..., None], (batch, 4, boxes, kinds)).reshape(batch, 4, -1)
        scores = scores.reshape(batch, -1)
    else:
        classes, scores = jnp.argmax(scores, axis=2).astype(jnp.int32), jnp.max(scores, axis=2)
    scores = jnp.where(jnp.logical_and(_wanted(classes, options), scores > options.confidence), scores, -jnp.inf)
    if scores.shape[1] <= options.candidates:
        return _Candidates(corners, scores, classes)
    scores, best = jax.lax.top_k(scores, options.candidates)
    return _Candidates(jnp.take_along_axis(corners, best[:, None], axis=2), scores, jnp.take_along_axis(classes, best, axis=1))


def _wanted(classes: jax.Array, options: Suppression) -> jax.Array:
    return jnp.full(classes.shape, True) if options.classes is None else jnp.isin(classes, jnp.array(options.classes, jnp.int32))


def _greedy(boxes: jax.Array, scores: jax.Array, options: Suppression) -> tuple[jax.Array, jax.Array]:
    """(numbers of the chosen candidates int32 [B, D], their scores [B, D], -inf where there is none) of boxes [B, 4, K], scores [B, K]."""
    batch, count = scores.shape
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])  # [B, K]
    numbers = jnp.arange(count, dtype=jnp.int32)

    def unfinished(state: tuple[jax.Array, ...]) -> jax.Array:
        place, left, _, _ = state
        return jnp.logical_and(place < options.most, jnp.any(left > -jnp.inf))

    def take_one(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        place, left, order, found = state
        best = jnp.argmax(left, axis=1).astype(jnp.int32)[:, None]  # [B, 1]
        score = jnp.max(left, axis=1, keepdims=True)
        box, area = jnp.take_along_axis(boxes, best[:, None], axis=2), jnp.take_along_axis(areas, best, axis=1)  # [B, 4, 1], [B, 1]
        struck = jnp.logical_or(_overlap(boxes, areas, box, area) > options.iou, numbers == best)
        left = jnp.where(struck, -jnp.inf, left)
        order = jax.lax.dynamic_update_slice_in_dim(order, best, place, axis=1)
        return place + 1, left, order, jax.lax.dynamic_update_slice_in_dim(found, score, place, axis=1)

    shape = (batch, options.most)
    state = (jnp.int32(0), scores, jnp.zeros(shape, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32))
    _, _, order, found = jax.lax.while_loop(unfinished, take_one, state)
    return order, found


def _overlap(boxes: jax.Array, areas: jax.Array, box: jax.Array, area: jax.Array) -> jax.Array:
    """Intersection over union of boxes [B, 4, K] with one box [B, 4, 1]: [B, K]; by components, as one of [.., 4] would idle most lanes."""
    width = jnp.minimum(boxes[:, 2], box[:, 2]) - jnp.maximum(boxes[:, 0], box[:, 0])
    height = jnp.minimum(boxes[:, 3], box[:, 3]) - jnp.maximum(boxes[:, 1], box[:, 1])
    shared = jnp.maximum(width, 0) * jnp.maximum(height, 0)
    return shared / (areas + area - shared)
