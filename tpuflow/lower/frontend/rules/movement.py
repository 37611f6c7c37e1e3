"""Rules of primitives that make, move, cut and join arrays, and of those that change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tpuflow.dtypes import S32, U32, DType
from tpuflow.dtypes import from_numpy as dtype_of
from tpuflow.lower.frontend.registry import lowers
from tpuflow.lower.frontend.rules.elementwise import as_index
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value


@lowers(
    "copy", "copy_p", "stop_gradient", "device_put", "sharding_constraint", "layout_constraint", "reshard",
    "name", "pvary", "mesh_cast", "stage", "random_clone", "multiple_of", "reduce_manual_axes", keys=True,
)  # fmt: skip
def _identity(b: Builder, *operands: Value) -> tuple[Value, ...]:
    return operands


@lowers("tie", keys=True)
def _tie(b: Builder, _: Value, y: Value) -> Value:
    return y


@lowers("broadcast_in_dim")
def _broadcast_in_dim(b: Builder, x: Value, *, shape: Sequence[int], broadcast_dimensions: Sequence[int]) -> Value:
    """A broadcast that only adds axes of size 1 is a reshape."""
    if x.type.elems == TensorType(x.dtype, tuple(shape)).elems and list(broadcast_dimensions) == sorted(broadcast_dimensions):
        return b.reshape(x, shape)
    return b.broadcast(x, shape, broadcast_dimensions)


@lowers("reshape")
def _reshape(b: Builder, x: Value, *, new_sizes: Sequence[int], dimensions: Sequence[int] | None) -> Value:
    return b.reshape(b.transpose(x, dimensions) if dimensions else x, new_sizes)


@lowers("squeeze")
def _squeeze(b: Builder, x: Value, *, dimensions: Sequence[int]) -> Value:
    return b.reshape(x, [n for i, n in enumerate(x.shape) if i not in dimensions])


@lowers("expand_dims")
def _expand_dims(b: Builder, x: Value, *, dimensions: Sequence[int]) -> Value:
    sizes = iter(x.shape)
    return b.reshape(x, [1 if i in dimensions else next(sizes) for i in range(len(x.shape) + len(dimensions))])


@lowers("transpose")
def _transpose(b: Builder, x: Value, *, permutation: Sequence[int]) -> Value:
    return b.transpose(x, permutation)


@lowers("rev")
def _rev(b: Builder, x: Value, *, dimensions: Sequence[int]) -> Value:
    return b.reverse(x, [d for d in dimensions if x.shape[d] > 1])


@lowers("slice")
def _slice(b: Builder, x: Value, *, start_indices: Sequence[int], limit_indices: Sequence[int], strides: Sequence[int] | None) -> Value:
    return b.slice(x, start_indices, limit_indices, strides)


@lowers("split")
def _split(b: Builder, x: Value, *, sizes: Sequence[int], axis: int) -> tuple[Value, ...]:
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return tuple(b.slice_axis(x, axis, int(lo), int(hi)) for lo, hi in itertools.pairwise(edges))


@lowers("unstack")
def _unstack(b: Builder, x: Value, *, axis: int) -> tuple[Value, ...]:
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    return tuple(b.reshape(b.slice_axis(x, axis, i, i + 1), shape) for i in range(x.shape[axis]))


@lowers("stack")
def _stack(b: Builder, *parts: Value, axis: int) -> Value:
    shape = parts[0].shape
    return b.concatenate([b.reshape(p, (*shape[:axis], 1, *shape[axis:])) for p in parts], axis)


@lowers("tile")
def _tile(b: Builder, x: Value, *, reps: Sequence[int]) -> Value:
    """Every axis split into (copy, position), the copies broadcast, the two merged."""
    doubled = [n for pair in zip(reps, x.shape, strict=True) for n in pair]
    copies = b.broadcast(x, doubled, range(1, len(doubled), 2))
    return b.reshape(copies, [r * n for r, n in zip(reps, x.shape, strict=True)])


@lowers("concatenate")
def _concatenate(b: Builder, *parts: Value, dimension: int) -> Value:
    return b.concatenate(parts, dimension)


@lowers("pad")
def _pad(b: Builder, x: Value, value: Value, *, padding_config: Sequence[tuple[int, int, int]]) -> Value:
    low, high, interior = zip(*(map(int, row) for row in padding_config), strict=True) if padding_config else ((), (), ())
    return b.pad(x, value, low, high, interior)


@lowers("iota")
def _iota(b: Builder, *, dtype: Any, shape: Sequence[int], dimension: int) -> Value:
    return iota(b, dtype_of(dtype), shape, dimension)


def iota(b: Builder, dtype: DType, shape: Sequence[int], axis: int) -> Value:
    """Positions along an axis, counted in 32-bit integers and converted."""
    counted = b.iota(TensorType(dtype if dtype in (S32, U32) else S32, tuple(shape)), axis)
    return b.convert(counted, dtype)


@lowers("empty", "empty2")
def _empty(b: Builder, *, dtype: Any, shape: Sequence[int] = ()) -> Value:
    return b.full(TensorType(dtype_of(dtype), tuple(shape)), 0)


@lowers("dynamic_slice")
def _dynamic_slice(b: Builder, x: Value, *starts: Value, slice_sizes: Sequence[int]) -> Value:
    return b.dynamic_slice(x, clamped_starts(b, starts, slice_sizes, x.shape), slice_sizes)


@lowers("dynamic_update_slice")
def _dynamic_update_slice(b: Builder, x: Value, update: Value, *starts: Value) -> Value:
    return b.dynamic_update_slice(x, update, clamped_starts(b, starts, update.shape, x.shape))


def clamped_starts(b: Builder, starts: Sequence[Value], sizes: Sequence[int], shape: Sequence[int]) -> list[Value]:
    """Starts moved so that a piece of `sizes` lies within `shape`."""
    return [_clamped(b, start, n - size) for start, size, n in zip(starts, sizes, shape, strict=True)]


def _clamped(b: Builder, start: Value, last: int) -> Value:
    """start between 0 and `last`."""
    if last == 0:
        return b.scalar(0, S32)
    return b.min(b.max(as_index(b, start), 0), last)
