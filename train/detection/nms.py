"""Non-maximum suppression on the device: fixed shapes, one loop that takes the best box left and strikes out what overlaps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from train.detection.boxes import xywh_to_xyxy
from train.ranges import check_positive, check_shares

CLASS_OFFSET_PIXELS = 7680.0
"""Boxes of other classes are put so far apart that they never overlap; YOLOv5's number, larger than any picture."""

FLOAT_BITS = 30
"""The highest bit that a positive fp32 number below 2 can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suppression:
    """How detections are chosen; defaults are those of YOLOv5's detection, `VALIDATION` has those of its evaluation.

    confidence: the least score. iou: boxes of a class that overlap more than this are one. most: detections a picture. candidates: the
    best so many take part, and what equals the last of them. several: a box is of every class that scores enough, not only of the best.
    agnostic: boxes of different classes suppress each other. classes: which ones are wanted, None for all; a box of another best class is
    not taken for one of these.
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
        check_shares(self, ("confidence", "iou"))
        check_positive(self, ("most", "candidates"))


VALIDATION = Suppression(confidence=0.001, iou=0.6, most=300, several=True)


class Detections(NamedTuple):
    """Of each picture, best first: boxes float32 [B, D, 4], corners in pixels; scores float32, classes int32, valid bool [B, D].

    Arrays of JAX, or of NumPy once they have left the device.
    """

    boxes: Any
    scores: Any
    classes: Any
    valid: Any


def suppress(predictions: jax.Array, options: Suppression = VALIDATION) -> Detections:
    """Detections of predictions [B, N, 5 + classes]: boxes x y w h in pixels, objectness and classes' scores from 0 to 1.

    A score is objectness times the class's; of equal ones the lowest class's first box comes first. Where fewer than `most` boxes are
    found, the rest of the rows is 0 with valid False. What YOLOv5's non_max_suppression gives, greedy suppression as torchvision's nms.
    """
    predictions = predictions.astype(jnp.float32)
    corners = xywh_to_xyxy(predictions[..., :4]).transpose(0, 2, 1)  # [B, 4, N], so that the device's lanes lie along N
    numbers, classes, scores = _greedy(corners, _candidates(predictions, options), options)
    valid = scores > -jnp.inf
    boxes = jnp.take_along_axis(corners, numbers[:, None], axis=2).transpose(0, 2, 1)  # [B, 4, D] -> [B, D, 4]
    return Detections(jnp.where(valid[..., None], boxes, 0), jnp.where(valid, scores, 0), jnp.where(valid, classes, 0), valid)


def _candidates(predictions: jax.Array, options: Suppression) -> jax.Array:
    """The scores [B, C, N] of what takes part, -inf elsewhere."""
    scores = (predictions[..., 5:] * predictions[..., 4:5]).transpose(0, 2, 1)  # [B, N, C] -> [B, C, N]
    kinds = jnp.arange(scores.shape[1], dtype=jnp.int32)[:, None]
    chosen = scores > options.confidence
    if not options.several:
        chosen = jnp.logical_and(chosen, kinds == jnp.argmax(scores, axis=1)[:, None])
    if options.classes is not None:
        chosen = jnp.logical_and(chosen, jnp.isin(kinds, jnp.array(options.classes, jnp.int32)))
    scores = jnp.where(chosen, scores, -jnp.inf)
    if scores.shape[1] * scores.shape[2] <= options.candidates:
        return scores
    return jnp.where(scores >= _least_of_best(scores, options.candidates), scores, -jnp.inf)


def _least_of_best(scores: jax.Array, count: int) -> jax.Array:
    """The `count`-th highest of the positive ones among scores [B, C, N], or 0 if they are fewer: [B, 1, 1].

    Found bit by bit, as positive floats are ordered as their bits are; a sort of a million scores would not fit into on-chip memory.
    """
    bits = jax.lax.bitcast_convert_type(jnp.maximum(scores, 0), jnp.int32)

    def with_bit(step: jax.Array, least: jax.Array) -> jax.Array:
        higher = least + jnp.left_shift(jnp.int32(1), FLOAT_BITS - step)
        enough = jnp.sum(bits >= higher, axis=(1, 2), keepdims=True, dtype=jnp.int32) >= count
        return jnp.where(enough, higher, least)

    least = jax.lax.fori_loop(0, FLOAT_BITS + 1, with_bit, jnp.zeros((len(scores), 1, 1), jnp.int32))
    return jax.lax.bitcast_convert_type(least, jnp.float32)


class _State(NamedTuple):
    """How many places are taken, what is left of the scores [B, C, N], the highest left of each class [B, C], and what was found."""

    place: jax.Array
    left: jax.Array
    highest: jax.Array
    found: tuple[jax.Array, jax.Array, jax.Array]


def _greedy(corners: jax.Array, scores: jax.Array, options: Suppression) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(numbers of the chosen boxes int32, classes int32, scores; -inf where there is none), each [B, D], of corners [B, 4, N]."""
    batch, _, count = scores.shape
    numbers, rows = jnp.arange(count, dtype=jnp.int32), jnp.arange(batch, dtype=jnp.int32)

    def unfinished(state: _State) -> jax.Array:
        return jnp.logical_and(state.place < options.most, jnp.any(state.highest > -jnp.inf))

    def take_one(state: _State) -> _State:
        kind = jnp.argmax(state.highest, axis=1).astype(jnp.int32)  # [B]
        of_kind = jnp.take_along_axis(state.left, kind[:, None, None], axis=1)[:, 0]  # [B, N]
        number = jnp.argmax(of_kind, axis=1).astype(jnp.int32)
        struck = jnp.logical_or(_overlap(_apart(corners, kind, options), number) > options.iou, numbers == number[:, None])
        if options.agnostic:
            left = jnp.where(struck[:, None], -jnp.inf, state.left)
            highest = jnp.max(left, axis=2)
        else:  # one class's row is read and written, however many there are
            of_kind = jnp.where(struck, -jnp.inf, of_kind)
            left = state.left.at[rows, kind].set(of_kind)
            highest = state.highest.at[rows, kind].set(jnp.max(of_kind, axis=1))
        return _State(state.place + 1, left, highest, (
            _written(state.found[0], state.place, number),
            _written(state.found[1], state.place, kind),
            _written(state.found[2], state.place, jnp.max(state.highest, axis=1)),
        ))  # fmt: skip

    shape = (batch, options.most)
    found = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32)
    return jax.lax.while_loop(unfinished, take_one, _State(jnp.int32(0), scores, jnp.max(scores, axis=2), found)).found


def _written(found: jax.Array, place: jax.Array, one: jax.Array) -> jax.Array:
    """`found` [B, D] with `one` [B] in a column."""
    return jax.lax.dynamic_update_slice_in_dim(found, one[:, None], place, axis=1)


def _apart(corners: jax.Array, kind: jax.Array, options: Suppression) -> jax.Array:
    """The boxes [B, 4, N] where those of that class [B] are compared: moved as the original moves them, which rounds them."""
    return corners if options.agnostic else corners + (kind * CLASS_OFFSET_PIXELS)[:, None, None]


def _overlap(boxes: jax.Array, number: jax.Array) -> jax.Array:
    """Intersection over union of boxes [B, 4, N] with one of each row of them, its number [B]: [B, N]."""
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])  # [B, N]
    box, area = jnp.take_along_axis(boxes, number[:, None, None], axis=2), jnp.take_along_axis(areas, number[:, None], axis=1)
    width = jnp.minimum(boxes[:, 2], box[:, 2]) - jnp.maximum(boxes[:, 0], box[:, 0])
    height = jnp.minimum(boxes[:, 3], box[:, 3]) - jnp.maximum(boxes[:, 1], box[:, 1])
    shared = jnp.maximum(width, 0) * jnp.maximum(height, 0)
    return shared / (areas + area - shared)
