"""Sorting and top-k."""

from __future__ import annotations

from collections.abc import Sequence

from tpuflow.dtypes import PRED, S32, U8
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.operations.elementwise import ordered_bits
from tpuflow.lower.operations.movement import iota


def sort(b: Builder, operands: Sequence[Value], axis: int, keys: int = 1, count: int | None = None) -> tuple[Value, ...]:
    """Operands sorted together by the first `keys` of them, stable and ascending, NaN last, of each row the first `count`; truth values as
    bytes, and keys of types that are only stored by what they are computed in."""
    as_numbers = [b.convert(x, U8) if x.dtype == PRED else x for x in operands]
    if any(x.dtype.wide is not None for x in operands[:keys]):
        done = b.sort([*(b.convert(x, x.dtype.computed) for x in as_numbers[:keys]), *as_numbers], axis, keys, count)[keys:]
    else:
        done = b.sort(as_numbers, axis, keys, count)
    return tuple(b.convert(y, x.dtype) for x, y in zip(operands, done, strict=True))


def top_k(b: Builder, x: Value, *, k: int, axis: int) -> tuple[Value, Value]:
    """The k largest, largest first, and their places; of equal ones the first comes first, NaN counts as largest."""
    axis %= len(x.shape)
    place = iota(b, S32, x.shape, axis)
    _, values, places = sort(b, (descending_key(b, x), x, place), axis, count=k)
    return values, places


def sort_by(b: Builder, key: Value, operands: Sequence[Value], axis: int) -> tuple[Value, ...]:
    """Operands sorted together by a key that is not one of them, stable and ascending."""
    return sort(b, (key, *operands), axis)[1:]


def total_order_key(b: Builder, x: Value) -> Value:
    """An integer that grows as x does, floats in the order of their bits: -NaN < -inf < ... < -0 < 0 < ... < inf < NaN."""
    x = b.convert(x, x.dtype.computed)
    return ordered_bits(b, x) if x.dtype.is_float else b.convert(x, U8) if x.dtype == PRED else x


def descending_key(b: Builder, x: Value) -> Value:
    """An integer that grows as x falls."""
    return b.not_(total_order_key(b, x))
