"""Reductions and prefix scans by the device's operations, argmax, and cumlogsumexp."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from tpuflow.dtypes import F32, PRED, S32, U8, DType
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.operations.movement import iota

_ON_PRED = {"max": "or", "min": "and", "add": "or", "mul": "and"}


def accumulator(op: str, dtype: DType) -> DType:
    """Sums and products of f16 and bf16 are kept in f32 and rounded once."""
    return F32 if dtype.is_float and op in ("add", "mul") else dtype


def reduce(b: Builder, op: str, x: Value, axes: Sequence[int], start: Value | None = None) -> Value:
    """x combined over the axes in its accumulator's type; then with `start` ([]), if there is one, in x's own."""
    op = _ON_PRED.get(op, op) if x.dtype == PRED else op
    reduced = b.convert(b.reduce(op, b.convert(x, accumulator(op, x.dtype)), axes), x.dtype)
    return reduced if start is None else combine(b, op, b.splat(start, reduced.shape), reduced)


def combine(b: Builder, op: str, x: Value, y: Value) -> Value:
    """Combine two arrays elementwise by a reduction's operation."""
    op = _ON_PRED.get(op, op) if x.dtype == PRED else op
    return b.emit(op, (x, y)).result


def cumulative(b: Builder, op: str, x: Value, *, axis: int, reverse: bool) -> Value:
    """Running combination along an axis, in the accumulator's type."""
    wide = b.convert(x, accumulator(op, x.dtype))
    return b.convert(b.cumulative(op, wide, axis, reverse=reverse), x.dtype)


def first_place_of(b: Builder, op: str, x: Value, axis: int, index_dtype: DType) -> Value:
    """The first position of the extreme value (`op`: max or min), or of the first NaN: two reductions."""
    x = b.convert(x, U8) if x.dtype == PRED else x
    extreme = b.reduce(op, x, (axis,))
    found = b.eq(x, along(b, extreme, x.shape, axis))
    if x.dtype.is_float:
        found = b.or_(found, b.ne(x, x))
    return first_true(b, found, axis, index_dtype)


def along(b: Builder, x: Value, shape: Sequence[int], axis: int) -> Value:
    """x, the result of a reduction along `axis`, broadcast back to `shape`."""
    return b.broadcast(x, shape, [i for i in range(len(shape)) if i != axis])


def first_true(b: Builder, found: Value, axis: int, index_dtype: DType) -> Value:
    """The first position along an axis at which `found` is true; the last position if it is true nowhere."""
    place = iota(b, S32, found.shape, axis)
    return b.convert(b.reduce("min", b.select(found, place, found.shape[axis] - 1), (axis,)), index_dtype)


def cumlogsumexp(b: Builder, x: Value, *, axis: int, reverse: bool) -> Value:
    """Doubling steps: after step k every position holds logsumexp of the 2^k before it; each step is stable by itself."""
    wide = b.convert(x, F32)
    shift = 1
    while shift < x.shape[axis]:
        wide = _logaddexp(b, wide, _shifted(b, wide, axis, -shift if reverse else shift))
        shift *= 2
    return b.convert(wide, x.dtype)


def _shifted(b: Builder, x: Value, axis: int, by: int) -> Value:
    """x moved along the axis, -inf moving in."""
    low = [by if i == axis else 0 for i in range(len(x.shape))]
    return b.pad(x, -math.inf, low, [-n for n in low])


def _logaddexp(b: Builder, x: Value, y: Value) -> Value:
    largest = b.max(x, y)
    base = b.select(b.is_finite(largest), largest, 0)
    return b.select(b.eq(largest, math.inf), largest, b.add(b.log(b.add(b.exp(b.sub(x, base)), b.exp(b.sub(y, base)))), base))


def total(b: Builder, op: str, parts: Sequence[Value]) -> Value:
    """The parts combined in order."""
    return functools.reduce(lambda x, y: combine(b, op, x, y), parts)
