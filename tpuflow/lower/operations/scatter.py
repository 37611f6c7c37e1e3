"""Scatter in full generality: set, add, multiply, minimum, maximum."""

from __future__ import annotations

import math

from tpuflow.dtypes import PRED, S32, U8
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.operations.reductions import combine
from tpuflow.lower.operations.rows import Axes, Plan, SliceAxes, as_matrix, inverse, one_hot, one_hot_permutation, rows, starts

_PRED_MODES = {"set": "set", "add": "max", "max": "max", "mul": "min", "min": "min"}


def scatter(b: Builder, operand: Value, indices: Value, updates: Value, axes: SliceAxes, op: str, *, clip: bool = False) -> Value:
    """The operand with slices changed by `op` (set, add, mul, min or max), in the order of the indices.

    Slices that are not within the operand are dropped; with `clip` their starts are clamped instead.
    """
    if operand.dtype != PRED:
        return _scattered(b, operand, indices, updates, axes, op, clip=clip)
    as_bytes = _scattered(b, b.convert(operand, U8), indices, b.convert(updates, U8), axes, _PRED_MODES[op], clip=clip)
    return b.convert(as_bytes, PRED)


def _scattered(b: Builder, operand: Value, indices: Value, updates: Value, axes: SliceAxes, op: str, *, clip: bool) -> Value:
    kept = [i for i in range(len(operand.shape)) if i not in axes.removed]
    sizes = [1] * len(operand.shape)
    for axis, place in zip(kept, axes.window, strict=True):
        sizes[axis] = updates.shape[place]
    plan = Plan(operand.type, tuple(sizes), axes.indexed, axes.batching, indices.shape[:-1])
    if not updates.type.elems:
        return operand
    if plan.one_slice:
        return _one_slice(b, plan, operand, indices, updates, op, clip=clip)
    if plan.one_hot_axis is not None:
        return _by_one_hot(b, plan, operand, indices, updates, op, clip=clip)
    changes = _updates_as_rows(b, plan, updates, kept, axes.window)
    changed = b.scatter_rows(as_matrix(b, plan, operand), rows(b, plan, indices, clip=clip), changes, op)
    return _back(b, changed, operand, plan.permutation)


def _combined(b: Builder, op: str, old: Value, new: Value) -> Value:
    return new if op == "set" else combine(b, op, old, new)


def _back(b: Builder, x: Value, operand: Value, permutation: Axes) -> Value:
    """A changed matrix in the operand's shape again."""
    return b.transpose(b.reshape(x, [operand.shape[i] for i in permutation]), inverse(permutation))


def _one_slice(b: Builder, plan: Plan, operand: Value, indices: Value, updates: Value, op: str, *, clip: bool) -> Value:
    """A scatter of one slice changes a dynamic slice."""
    found, inside = starts(b, plan, indices, clip=clip)
    first = [b.reshape(found[axis], ()) if axis in found else b.scalar(0, S32) for axis in range(len(plan.sizes))]
    old = b.dynamic_slice(operand, first, plan.sizes)
    new = _combined(b, op, old, b.reshape(updates, plan.sizes))
    if inside is not None:
        new = b.select(b.splat(b.reshape(inside, ()), new.shape), new, old)
    return b.dynamic_update_slice(operand, new, first)


def _by_one_hot(b: Builder, plan: Plan, operand: Value, indices: Value, updates: Value, op: str, *, clip: bool) -> Value:
    """One element of each of many rows: selected by a one-hot mask, without indexed stores."""
    matrix, here, inside = one_hot(b, plan, operand, indices, clip=clip)
    new = b.broadcast(b.reshape(updates, matrix.shape[:1]), matrix.shape, (0,))
    chosen = here if inside is None else b.and_(here, inside)
    return _back(b, b.select(chosen, _combined(b, op, matrix, new), matrix), operand, one_hot_permutation(plan))


def _updates_as_rows(b: Builder, plan: Plan, updates: Value, kept: Axes, window_dims: Axes) -> Value:
    """The updates with batch axes first and the slice's axes in the order of rows and columns: [R, C]."""
    place = dict(zip(kept, window_dims, strict=True))
    batch = [i for i in range(len(updates.shape)) if i not in window_dims]
    held = [place[i] for i in plan.slice_axes if i in place]
    ones = [place[i] for i in kept if i not in plan.slice_axes]
    moved = b.transpose(updates, (*batch, *held, *ones))
    return b.reshape(moved, (math.prod(plan.row_shape), plan.matrix[1]))
