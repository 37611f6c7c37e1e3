"""What the device's elementwise operations compute, where NumPy's own functions differ from it; `isa.elementwise` has the table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tpuflow.dtypes import F32, DType
from tpuflow.isa.numpy_rounding import MIN_NORMAL, Array, flush, from_f32, narrow, widen

Function = Callable[..., Array]


def erf(x: Array) -> Array:
    """The error function of float64."""
    return np.fromiter(map(math.erf, x.ravel().tolist()), np.float64, x.size).reshape(x.shape)


def round_away(x: Array) -> Array:
    """The nearest whole number, halves away from zero."""
    whole = np.trunc(x)
    return np.where(np.abs(x - whole) >= 0.5, whole + np.copysign(np.float32(1), x), np.copysign(whole, x))


def power(x: Array, y: Array) -> Array:
    """x to the power of y. NumPy takes a square root if the exponent is a single 0.5, which makes -0 of -0 and NaN of -inf; these
    powers are 0 and inf."""
    edge = (y == 0.5) & ((x == 0) | (x == -np.inf))
    return np.where(edge, np.abs(x), np.power(x, y))


def product(x: Array, y: Array) -> Array:
    """x * y."""
    return _underflow(x * y, lambda: np.multiply(x, y, dtype=np.float64))


def quotient(x: Array, y: Array) -> Array:
    """x / y."""
    return _underflow(x / y, lambda: np.divide(x, y, dtype=np.float64))


def _underflow(result: Array, exact: Callable[[], Array]) -> Array:
    """f32 results with the smallest ones rounded again from float64, where IEEE's gradual underflow differs from the device's."""
    small = (np.abs(result) <= MIN_NORMAL) & (result != 0)
    return np.where(small, narrow(exact(), F32), result) if small.any() else result


def maximum(x: Array, y: Array) -> Array:
    """The larger one; +0 is above -0, NaN is handed on."""
    return np.where((x == 0) & (y == 0), x + y, np.maximum(x, y))


def minimum(x: Array, y: Array) -> Array:
    """The smaller one; -0 is below +0, NaN is handed on."""
    return -maximum(-x, -y)


def rounded(function: Function) -> Function:
    """An f32 function on the values of any float type, its result rounded to that type."""

    def apply(*operands: Array, dtype: DType) -> Array:
        return from_f32(flush(function(*(widen(x, dtype) for x in operands))), dtype)

    return apply


def rounded_once(function: Function) -> Function:
    """A float64 function on the values of any float type, its result rounded to that type."""

    def apply(*operands: Array, dtype: DType) -> Array:
        return narrow(function(*(widen(x, dtype).astype(np.float64) for x in operands)), dtype)

    return apply


def with_sign_bit(change: Callable[[Array, Any], Array]) -> Function:
    """A change of the sign bit (its mask is given), NaN written as the canonical one."""

    def apply(a: Array, *, dtype: DType) -> Array:
        word = np.dtype(f"u{dtype.bytes}")
        sign = word.type(1 << (8 * dtype.bytes - 1))
        changed = change(a.view(word), sign).view(dtype.numpy)
        return np.where(np.isnan(a), np.array(np.nan, dtype.numpy), changed)

    return apply


def absolute(a: Array) -> Array:
    """The absolute value of integers; the smallest one stays."""
    return np.abs(a) if a.dtype.kind == "i" else a


def count_ones(a: Array) -> Array:
    """Bits that are set."""
    return np.bitwise_count(a.view(f"u{a.itemsize}")).astype(a.dtype)


def count_leading_zeros(a: Array) -> Array:
    """Bits above the highest that is set."""
    length = np.frexp(a.view(f"u{a.itemsize}").astype(np.float64))[1]
    return (8 * a.itemsize - length).astype(a.dtype)


def integer_quotient(a: Array, b: Array) -> Array:
    """Truncated; all ones where b is 0."""
    x, y = a.astype(np.int64), b.astype(np.int64)
    size = np.abs(x) // np.where(y == 0, 1, np.abs(y))
    return np.where(y == 0, -1, size * np.sign(x) * np.sign(y)).astype(a.dtype)


def integer_remainder(a: Array, b: Array) -> Array:
    """With the sign of a; a where b is 0."""
    x, y = a.astype(np.int64), b.astype(np.int64)
    size = np.abs(x) % np.where(y == 0, 1, np.abs(y))
    return np.where(y == 0, x, size * np.sign(x)).astype(a.dtype)


def shift(move: Function, kind: str, *, saturate: bool) -> Function:
    """A shift of a read as kind "i" or "u"; an amount of the width or more (as unsigned) shifts everything out."""

    def apply(a: Array, b: Array) -> Array:
        width = 8 * a.itemsize
        amount = np.minimum(b.view(f"u{b.itemsize}"), width).astype(np.int64)
        wide = a.view(f"{kind}{a.itemsize}").astype(np.int64)
        shifted = move(wide, np.minimum(amount, width - 1) if saturate else amount)
        return shifted.astype(np.uint64).astype(f"u{a.itemsize}").view(a.dtype)

    return apply


def high_product(a: Array, b: Array) -> Array:
    """The upper half of the product of twice the width."""
    wide = np.dtype("i8" if a.dtype.kind == "i" else "u8")
    return (a.astype(wide) * b.astype(wide) >> wide.type(8 * a.itemsize)).astype(a.dtype)
