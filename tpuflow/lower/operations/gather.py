"""Gather in full generality."""

from __future__ import annotations

from tpuflow.dtypes import PRED, S32
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.graph.scalars import Scalar
from tpuflow.lower.operations.elementwise import WORDS
from tpuflow.lower.operations.rows import Axes, Plan, SliceAxes, as_matrix, one_hot, rows, starts

_LONGEST_ONE_HOT = 4096  # elements of a row: reading a few entries of a longer one beats comparing all of it


def gather(b: Builder, operand: Value, indices: Value, axes: SliceAxes, slice_sizes: Axes, fill: Scalar | None = None) -> Value:
    """Slices at `indices`. One that is not within the operand becomes `fill`; with fill None its start is clamped instead (XLA's clip)."""
    plan = Plan(operand.type, tuple(slice_sizes), axes.indexed, axes.batching, indices.shape[:-1])
    if plan.one_slice:
        taken = _one_slice(b, plan, operand, indices, fill)
    elif plan.one_hot_axis is not None and operand.shape[plan.one_hot_axis] <= _LONGEST_ONE_HOT:
        taken = _by_one_hot(b, plan, operand, indices, fill)
    else:
        taken = b.take_rows(as_matrix(b, plan, operand), rows(b, plan, indices, clip=fill is None), 0 if fill is None else fill)
    return _laid_out(b, plan, taken, axes.removed, axes.window)


def _one_slice(b: Builder, plan: Plan, operand: Value, indices: Value, fill: Scalar | None) -> Value:
    """A gather of one slice is a dynamic slice, transposed to `Plan.permutation`; `fill` (None: clamp) if it is not within the operand."""
    found, inside = starts(b, plan, indices, clip=fill is None)
    first = [b.reshape(found[axis], ()) if axis in found else b.scalar(0, S32) for axis in range(len(plan.sizes))]
    piece = b.transpose(b.dynamic_slice(operand, first, plan.sizes), plan.permutation)
    if inside is None or fill is None:
        return piece
    return b.select(b.splat(b.reshape(inside, ()), piece.shape), piece, fill)


def _by_one_hot(b: Builder, plan: Plan, operand: Value, indices: Value, fill: Scalar | None) -> Value:
    """One element of each of many short rows, without indexed loads: a one-hot mask clears all others, and `or` keeps the bits."""
    matrix, here, inside = one_hot(b, plan, operand, indices, clip=fill is None)
    if inside is not None and fill is not None:
        matrix = b.select(inside, matrix, fill)
    if operand.dtype == PRED:
        return b.reduce("or", b.and_(here, matrix), (1,))
    word = WORDS[operand.dtype.bytes]
    if operand.dtype.bits < 8:
        return b.convert(b.reduce("or", b.select(here, b.convert(matrix, word), 0), (1,)), operand.dtype)
    return b.bitcast(b.reduce("or", b.select(here, b.bitcast(matrix, word), 0), (1,)), operand.dtype)


def _laid_out(b: Builder, plan: Plan, taken: Value, removed: Axes, offset_dims: Axes) -> Value:
    """[R, C] -> the gather's result: batch axes, with the slice's axes at `offset_dims`."""
    sizes = [plan.sizes[i] for i in plan.slice_axes]
    full = b.reshape(taken, (*plan.batch, *sizes))
    kept = [i for i in range(len(plan.sizes)) if i not in removed]
    full = b.reshape(full, (*plan.batch, *(plan.sizes[i] for i in plan.slice_axes if i not in removed), *_ones(plan, kept)))
    held = [i for i in plan.slice_axes if i not in removed] + [i for i in kept if i not in plan.slice_axes]
    rank = len(plan.batch) + len(kept)
    batch_dims = [i for i in range(rank) if i not in offset_dims]
    source = {place: i for i, place in enumerate(batch_dims)}
    source |= {place: len(plan.batch) + held.index(axis) for axis, place in zip(kept, offset_dims, strict=True)}
    return b.transpose(full, [source[i] for i in range(rank)])


def _ones(plan: Plan, kept: Axes) -> list[int]:
    """Axes of size 1 that the slice keeps although rows are counted along them."""
    return [1 for i in kept if i not in plan.slice_axes]
