"""Operations that make, move, cut and join arrays, where the builder's own methods are not enough."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tpuflow.dtypes import PRED, S32, U32, DType
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.operations.elementwise import as_index
from tpuflow.lower.operations.ranges import range_of

TOKEN = TensorType(PRED, (0,))
"""The type of a token. Effects of a Program are ordered anyway, so a token carries nothing: an empty array, as JAX passes it."""


def token(b: Builder, *after: Value) -> Value:
    """A token, of others or of nothing."""
    return b.full(TOKEN, False)


def broadcast_in_dim(b: Builder, x: Value, *, shape: Sequence[int], broadcast_dimensions: Sequence[int]) -> Value:
    """Operand axis i lies along result axis broadcast_dimensions[i]. A broadcast that only adds axes of size 1 is a reshape."""
    if x.type.elems == TensorType(x.dtype, tuple(shape)).elems and list(broadcast_dimensions) == sorted(broadcast_dimensions):
        return b.reshape(x, shape)
    return b.broadcast(x, shape, broadcast_dimensions)


def split(b: Builder, x: Value, *, sizes: Sequence[int], axis: int) -> tuple[Value, ...]:
    """Pieces of these sizes, one after the other along an axis."""
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return tuple(b.slice_axis(x, axis, int(lo), int(hi)) for lo, hi in itertools.pairwise(edges))


def unstack(b: Builder, x: Value, *, axis: int) -> tuple[Value, ...]:
    """The elements along an axis, which they do not have any more."""
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    return tuple(b.reshape(b.slice_axis(x, axis, i, i + 1), shape) for i in range(x.shape[axis]))


def stack(b: Builder, *parts: Value, axis: int) -> Value:
    """Arrays of one shape along a new axis."""
    shape = parts[0].shape
    return b.concatenate([b.reshape(p, (*shape[:axis], 1, *shape[axis:])) for p in parts], axis)


def tile(b: Builder, x: Value, *, reps: Sequence[int]) -> Value:
    """Every axis split into (copy, position), the copies broadcast, the two merged."""
    doubled = [n for pair in zip(reps, x.shape, strict=True) for n in pair]
    copies = b.broadcast(x, doubled, range(1, len(doubled), 2))
    return b.reshape(copies, [r * n for r, n in zip(reps, x.shape, strict=True)])


def iota(b: Builder, dtype: DType, shape: Sequence[int], axis: int) -> Value:
    """Positions along an axis, counted in 32-bit integers and converted."""
    counted = b.iota(TensorType(dtype if dtype in (S32, U32) else S32, tuple(shape)), axis)
    return b.convert(counted, dtype)


def dynamic_slice(b: Builder, x: Value, *starts: Value, slice_sizes: Sequence[int]) -> Value:
    """The piece of `slice_sizes` that begins at `starts` (integers []), moved so that it lies within x."""
    return b.dynamic_slice(x, _clamped(b, starts, slice_sizes, x.shape), slice_sizes)


def dynamic_update_slice(b: Builder, x: Value, update: Value, *starts: Value) -> Value:
    """x with `update` written at `starts` (integers []), moved so that it lies within x."""
    return b.dynamic_update_slice(x, update, _clamped(b, starts, update.shape, x.shape))


def _clamped(b: Builder, starts: Sequence[Value], sizes: Sequence[int], shape: Sequence[int]) -> list[Value]:
    """Starts moved so that a piece of `sizes` lies within `shape`."""
    return [_between(b, start, n - size) for start, size, n in zip(starts, sizes, shape, strict=True)]


def _between(b: Builder, start: Value, last: int) -> Value:
    """start between 0 and `last`."""
    if last == 0:
        return b.scalar(0, S32)
    lowest, highest = range_of(b, start)
    index = as_index(b, start)
    index = index if lowest >= 0 else b.max(index, 0)
    return index if highest <= last else b.min(index, last)
