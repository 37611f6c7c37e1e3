"""Rules of reductions, prefix scans, sorts and what is made of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from tpuflow.dtypes import F32, PRED, S32, U8, DType
from tpuflow.dtypes import from_numpy as dtype_of
from tpuflow.lower.frontend.jax_compat import opened
from tpuflow.lower.frontend.registry import UnsupportedForm, lowers
from tpuflow.lower.frontend.rules.elementwise import ordered_bits
from tpuflow.lower.frontend.rules.movement import iota
from tpuflow.lower.frontend.rules.reducers import reduce_by
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value

_REDUCE = {
    "reduce_sum": "add", "reduce_prod": "mul", "reduce_max": "max", "reduce_min": "min",
    "reduce_and": "and", "reduce_or": "or", "reduce_xor": "xor",
}  # fmt: skip
_CUMULATIVE = {"cumsum": "add", "cumprod": "mul", "cummax": "max", "cummin": "min"}
_ON_PRED = {"max": "or", "min": "and", "add": "or", "mul": "and"}
_MONOIDS = {"add": "add", "add_any": "add", "mul": "mul", "max": "max", "min": "min", "and": "and", "or": "or", "xor": "xor"}


def accumulator(op: str, dtype: DType) -> DType:
    """Sums and products of f16 and bf16 are kept in f32 and rounded once."""
    return F32 if dtype.is_float and op in ("add", "mul") else dtype


def reduce(b: Builder, op: str, x: Value, axes: Sequence[int]) -> Value:
    """x combined over the axes in its accumulator's type."""
    op = _ON_PRED.get(op, op) if x.dtype == PRED else op
    return b.convert(b.reduce(op, b.convert(x, accumulator(op, x.dtype)), axes), x.dtype)


def combine(b: Builder, op: str, x: Value, y: Value) -> Value:
    """One step of a reduction."""
    op = _ON_PRED.get(op, op) if x.dtype == PRED else op
    return b.emit(op, (x, y)).result


def monoid(jaxpr: Any) -> str | None:
    """The reduction that a reducer's jaxpr means, if that is one known operation on its two arguments."""
    inner, _ = opened(jaxpr)
    if len(inner.eqns) != 1 or len(inner.outvars) != 1 or set(map(id, inner.eqns[0].invars)) != set(map(id, inner.invars)):
        return None
    name = inner.eqns[0].primitive.name
    return monoid(inner.eqns[0].params["jaxpr"]) if name in ("jit", "pjit", "closed_call") else _MONOIDS.get(name)


def _enter_reduce(primitive: str, op: str) -> None:
    @lowers(primitive)
    def rule(b: Builder, x: Value, *, axes: Sequence[int]) -> Value:
        return reduce(b, op, x, axes)


def _enter_cumulative(primitive: str, op: str) -> None:
    @lowers(primitive)
    def rule(b: Builder, x: Value, *, axis: int, reverse: bool) -> Value:
        return cumulative(b, op, x, axis, reverse=reverse)


for _primitive, _op in _REDUCE.items():
    _enter_reduce(_primitive, _op)
for _primitive, _op in _CUMULATIVE.items():
    _enter_cumulative(_primitive, _op)


def cumulative(b: Builder, op: str, x: Value, axis: int, *, reverse: bool) -> Value:
    """Running combination along an axis, in the accumulator's type."""
    wide = b.convert(x, accumulator(op, x.dtype))
    return b.convert(b.cumulative(op, wide, axis, reverse=reverse), x.dtype)


@lowers("reduce")
def _reduce(b: Builder, *operands: Value, jaxpr: Any, dimensions: Sequence[int]) -> Value | tuple[Value, ...]:
    op = monoid(jaxpr)
    if op is None:
        return reduce_by(b, jaxpr, operands, dimensions)
    x, start = operands
    reduced = reduce(b, op, x, dimensions)
    return combine(b, op, b.splat(start, reduced.shape), reduced)


@lowers("argmax")
def _argmax(b: Builder, x: Value, *, axes: Sequence[int], index_dtype: Any) -> Value:
    return _first_place_of(b, "max", x, axes[0], dtype_of(index_dtype))


@lowers("argmin")
def _argmin(b: Builder, x: Value, *, axes: Sequence[int], index_dtype: Any) -> Value:
    return _first_place_of(b, "min", x, axes[0], dtype_of(index_dtype))


def _first_place_of(b: Builder, op: str, x: Value, axis: int, index_dtype: DType) -> Value:
    """The first position of the extreme value, or of the first NaN: two reductions."""
    x = b.convert(x, U8) if x.dtype == PRED else x
    extreme = b.reduce(op, x, (axis,))
    others = [i for i in range(len(x.shape)) if i != axis]
    found = b.eq(x, b.broadcast(extreme, x.shape, others))
    if x.dtype.is_float:
        found = b.or_(found, b.ne(x, x))
    place = iota(b, S32, x.shape, axis)
    return b.convert(b.reduce("min", b.select(found, place, x.shape[axis] - 1), (axis,)), index_dtype)


@lowers("cumlogsumexp")
def _cumlogsumexp(b: Builder, x: Value, *, axis: int, reverse: bool) -> Value:
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


@lowers("sort")
def _sort(b: Builder, *operands: Value, dimension: int, num_keys: int) -> tuple[Value, ...]:
    """Truth values are sorted as bytes."""
    as_numbers = [b.convert(x, U8) if x.dtype == PRED else x for x in operands]
    done = b.sort(as_numbers, dimension, num_keys)
    return tuple(b.convert(y, x.dtype) for x, y in zip(operands, done, strict=True))


@lowers("top_k")
def _top_k(b: Builder, x: Value, *, k: int, axis: int) -> tuple[Value, Value]:
    return _largest(b, x, k, axis)


def _largest(b: Builder, x: Value, k: int, axis: int) -> tuple[Value, Value]:
    """The k largest, largest first, and their places; of equal ones the first comes first, NaN counts as largest."""
    axis %= len(x.shape)
    place = iota(b, S32, x.shape, axis)
    _, values, places = b.sort((_descending_key(b, x), x, place), axis, 1)
    return b.slice_axis(values, axis, 0, k), b.slice_axis(places, axis, 0, k)


@lowers("approx_top_k")
def _approx_top_k(
    b: Builder, x: Value, *, k: int, reduction_dimension: int, is_max_k: bool, aggregate_to_topk: bool,
) -> tuple[Value, Value]:  # fmt: skip
    """Computed exactly."""
    if not aggregate_to_topk:
        raise UnsupportedForm("only aggregate_to_topk=True")
    values, places = _largest(b, x if is_max_k else b.neg(x), k, reduction_dimension)
    return values if is_max_k else b.neg(values), places


def _descending_key(b: Builder, x: Value) -> Value:
    """An integer that grows as x falls."""
    return b.not_(ordered_bits(b, x) if x.dtype.is_float else x)


def total(b: Builder, op: str, parts: Sequence[Value]) -> Value:
    """Parts combined one after the other."""
    return functools.reduce(lambda x, y: combine(b, op, x, y), parts)
