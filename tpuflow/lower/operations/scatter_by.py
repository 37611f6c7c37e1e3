"""Scatter by any computation, into any number of arrays at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tpuflow.dtypes import S32
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.operations.elementwise import as_index
from tpuflow.lower.operations.forms import Body
from tpuflow.lower.operations.gather import gather
from tpuflow.lower.operations.loops import scan
from tpuflow.lower.operations.rows import SliceAxes
from tpuflow.lower.operations.scatter import scatter

Values = Sequence[Value]


def scatter_by(
    b: Builder, body: Body, operands: Values, indices: Value, updates: Values, axes: SliceAxes, *, clip: bool = False, apart: bool = False
) -> tuple[Value, ...]:
    """The operands with slices changed to body(*slices, *updates), elementwise, in the order of the indices.

    Slices that are not within the operands are dropped; with `clip` their starts are clamped instead. apart: no two slices overlap (XLA's
    unique_indices), so that all are changed at once; otherwise a loop changes one after the other.
    """
    if not updates[0].type.elems:
        return tuple(operands)
    if apart or (math.prod(indices.shape[:-1]) == 1 and not axes.batching):
        return _at_once(b, body, operands, indices, updates, axes, clip=clip)
    return _one_by_one(b, body, operands, indices, updates, axes, clip=clip)


def _at_once(
    b: Builder, body: Body, operands: Values, indices: Value, updates: Values, axes: SliceAxes, *, clip: bool
) -> tuple[Value, ...]:
    taken = iter(updates[0].shape[axis] for axis in axes.window)
    sizes = [1 if axis in axes.removed else next(taken) for axis in range(len(operands[0].shape))]
    new = body(b, *(gather(b, x, indices, axes, sizes) for x in operands), *updates)
    return tuple(scatter(b, x, indices, y, axes, "set", clip=clip) for x, y in zip(operands, new, strict=True))


def _one_by_one(
    b: Builder, body: Body, operands: Values, indices: Value, updates: Values, axes: SliceAxes, *, clip: bool
) -> tuple[Value, ...]:
    """A loop over the slices: each is a scatter of one, and sees what those before it have left."""
    count = len(operands)
    one = SliceAxes(tuple(range(len(axes.window))), axes.removed, axes.indexed + axes.operand_batching)

    def trip(b: Builder, *values: Value) -> tuple[Value, ...]:
        return _at_once(b, body, values[:count], values[count], values[count + 1 :], one, clip=clip)

    stacked = (_every_component(b, indices, axes), *(_slices_first(b, x, axes.window) for x in updates))
    return scan(b, trip, stacked[0].shape[0], (), operands, stacked, ())


def _every_component(b: Builder, indices: Value, axes: SliceAxes) -> Value:
    """The index vectors one below the other [N, K], with the places along batching axes as components of their own."""
    kind = TensorType(S32, (*indices.shape[:-1], 1))
    batching = [b.iota(kind, axis) for axis in axes.indices_batching]
    whole = b.concatenate([as_index(b, indices), *batching], len(kind.shape) - 1) if batching else indices
    return b.reshape(whole, (math.prod(whole.shape[:-1]), whole.shape[-1]))


def _slices_first(b: Builder, updates: Value, window: Sequence[int]) -> Value:
    """The updates of each slice, one below the other: [N, window...]."""
    batch = [i for i in range(len(updates.shape)) if i not in window]
    moved = b.transpose(updates, (*batch, *window))
    return b.reshape(moved, (math.prod(moved.shape[: len(batch)]), *moved.shape[len(batch) :]))
