"""Which predictions answer for which boxes: the targets of YOLOv5's loss, in shapes that no batch changes."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

OFFSETS = ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (-0.5, 0.0), (0.0, -0.5))
"""What is taken off a centre (x, y) to find its cell and its neighbours on the left, above, on the right, below; in cells."""


class Targets(NamedTuple):
    """The candidates of one map, [N] each: N = 5 offsets x anchors x B images x M boxes, in this order.

    chosen: whether this prediction answers for this box; in all others the rest is 0 (sizes and anchors: 1), so that what is computed of
    them is finite. image, row, column, anchor: where the prediction is, s32. boxes: f32 [N, 4], centre relative to the cell, width and
    height in cells. anchors: f32 [N, 2], in cells. classes: s32.
    """

    chosen: jax.Array
    image: jax.Array
    row: jax.Array
    column: jax.Array
    anchor: jax.Array
    boxes: jax.Array
    anchors: jax.Array
    classes: jax.Array


def build_targets(
    boxes: jax.Array, classes: jax.Array, valid: jax.Array, grid: tuple[int, int], anchors: jax.Array, threshold: float
) -> Targets:
    """The targets of a map of `grid` (height, width) cells.

    boxes: f32 [B, M, 4], centre x, centre y, width, height, 0 to 1. classes: s32 [B, M]. valid: bool [B, M], false for padding. anchors:
    f32 [A, 2], widths and heights in cells. threshold: an anchor answers for a box unless one of its sides is so many times the other's.

    Besides the cell that holds the centre, those two neighbours answer which are nearest to it, if they are on the map; that is the rule
    of the YOLOv5 release, with the order in which it lists them.
    """
    size = jnp.array(grid[::-1], jnp.float32)  # (width, height)
    centres, sizes = boxes[..., :2] * size, boxes[..., 2:] * size  # [B, M, 2] each, in cells
    chosen = _near(centres, size)[:, None] & (_fits(sizes, anchors, threshold) & valid)  # [5, A, B, M]
    image, anchor = (jax.lax.broadcasted_iota(jnp.int32, chosen.shape, axis) for axis in (2, 1))
    cells = jnp.clip(jnp.trunc(centres - jnp.array(OFFSETS, jnp.float32)[:, None, None, None]), 0.0, size - 1)  # [5, 1, B, M, 2]
    found = jnp.concatenate(jnp.broadcast_arrays(centres - cells, sizes), axis=-1)  # [5, 1, B, M, 4]

    def kept(values: jax.Array, otherwise: float = 0) -> jax.Array:
        """[5 or 1, A or 1, B, M, ...] -> [N, ...]."""
        where = chosen.reshape(*chosen.shape, *[1] * (values.ndim - chosen.ndim))
        return jnp.where(where, values, otherwise).reshape(-1, *values.shape[chosen.ndim :])

    column, row = (kept(cells[..., axis].astype(jnp.int32)) for axis in (0, 1))
    return Targets(
        chosen=chosen.reshape(-1),
        image=kept(image),
        row=row,
        column=column,
        anchor=kept(anchor),
        boxes=jnp.concatenate([kept(found[..., :2]), kept(found[..., 2:], 1)], axis=-1),
        anchors=kept(anchors[None, :, None, None], 1),
        classes=kept(classes[None, None]),
    )


def _near(centres: jax.Array, size: jax.Array) -> jax.Array:
    """Whether the candidate of each offset is near enough: centres [B, M, 2] in cells -> [5, B, M]."""
    left, above = _first_half(centres)
    right, below = _first_half(size - centres)
    return jnp.stack([jnp.ones_like(left), left, above, right, below])


def _first_half(distances: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of centres so many cells [..., 2] from an edge: whether they are in that half of their cell which is nearer to it, and not at it."""
    found = (distances - jnp.floor(distances) < 0.5) & (distances > 1)
    return found[..., 0], found[..., 1]


def _fits(sizes: jax.Array, anchors: jax.Array, threshold: float) -> jax.Array:
    """Whether each anchor [A, 2] has about the size of each box [B, M, 2]: [A, B, M]."""
    ratio = sizes[None] / anchors[:, None, None]
    return jnp.max(jnp.maximum(ratio, 1 / ratio), axis=-1) < threshold
