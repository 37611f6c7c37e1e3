"""Boxes: their two forms, and how far two of them overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

EPSILON = 1e-7
"""Keeps quotients finite; the value of the YOLOv5 release, on which the losses depend in their last digits."""


def xywh_to_xyxy(boxes: jax.Array) -> jax.Array:
    """(centre x, centre y, width, height) -> (left, top, right, bottom): [..., 4] -> [..., 4]."""
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return jnp.concatenate([centre - half, centre + half], axis=-1)


def xyxy_to_xywh(boxes: jax.Array) -> jax.Array:
    """(left, top, right, bottom) -> (centre x, centre y, width, height): [..., 4] -> [..., 4]."""
    first, last = boxes[..., :2], boxes[..., 2:]
    return jnp.concatenate([(first + last) / 2, last - first], axis=-1)


def iou(a: jax.Array, b: jax.Array, kind: str = "iou", form: str = "xyxy") -> jax.Array:
    """How far boxes overlap, a [..., 4] and b [..., 4], broadcast against each other: [...].

    kind: "iou", the intersection over the union; or "ciou", which takes off the distance of the centres, relative to the diagonal of the
    box around both, and the difference of the aspect ratios (Zheng et al., Distance-IoU Loss, arXiv:1911.08287, eq. 10 to 12; no gradient
    goes through the weight alpha). form: of both, "xyxy" or "xywh", where widths are taken as they are.
    """
    first, second = FORMS[form](a), FORMS[form](b)
    return KINDS[kind](first, second, _overlap(first, second))


@dataclass(frozen=True, slots=True)
class _Sides:
    """The corners and the size of boxes, each [..., 2]."""

    first: jax.Array
    last: jax.Array
    size: jax.Array

    @property
    def area(self) -> jax.Array:
        return self.size[..., 0] * self.size[..., 1]

    @property
    def angle(self) -> jax.Array:
        """The arc tangent of width over height."""
        return jnp.arctan(self.size[..., 0] / self.size[..., 1])


def _of_corners(boxes: jax.Array) -> _Sides:
    first, last = boxes[..., :2], boxes[..., 2:]
    return _Sides(first, last, last - first)


def _of_centres(boxes: jax.Array) -> _Sides:
    corners = xywh_to_xyxy(boxes)
    return _Sides(corners[..., :2], corners[..., 2:], boxes[..., 2:])


def _overlap(a: _Sides, b: _Sides) -> jax.Array:
    shared = jnp.maximum(jnp.minimum(a.last, b.last) - jnp.maximum(a.first, b.first), 0)
    intersection = shared[..., 0] * shared[..., 1]
    return intersection / (a.area + b.area - intersection + EPSILON)


def _complete(a: _Sides, b: _Sides, overlap: jax.Array) -> jax.Array:
    around = jnp.maximum(a.last, b.last) - jnp.minimum(a.first, b.first)
    diagonal = jnp.sum(jnp.square(around), axis=-1) + EPSILON
    distance = jnp.sum(jnp.square(b.first + b.last - a.first - a.last), axis=-1) / 4
    aspect = (4 / math.pi**2) * jnp.square(b.angle - a.angle)
    missing = jnp.maximum(1 - overlap, 0)  # rounding can put an overlap above 1; of equal boxes alpha would then be 0 / 0
    alpha = jax.lax.stop_gradient(aspect / (aspect + missing + EPSILON))
    return overlap - (distance / diagonal + aspect * alpha)


FORMS: Mapping[str, Callable[[jax.Array], _Sides]] = {"xyxy": _of_corners, "xywh": _of_centres}
KINDS: Mapping[str, Callable[[_Sides, _Sides, jax.Array], jax.Array]] = {
    "iou": lambda a, b, overlap: overlap,
    "ciou": _complete,
}
