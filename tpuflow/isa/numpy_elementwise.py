"""The device's elementwise operations in NumPy: one table a family, names as in `isa.vector`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tpuflow.dtypes import F32, DType
from tpuflow.isa.numpy_rounding import MIN_NORMAL, Array, flush, from_f32, narrow, widen

Function = Callable[..., Array]


def _erf(x: Array) -> Array:
    return np.fromiter(map(math.erf, x.ravel().tolist()), np.float64, x.size).reshape(x.shape)


def _round_away(x: Array) -> Array:
    whole = np.trunc(x)
    return np.where(np.abs(x - whole) >= 0.5, whole + np.copysign(np.float32(1), x), np.copysign(whole, x))


def _power(x: Array, y: Array) -> Array:
    """Where it sees one exponent of a half, NumPy takes the square root: -0 of -0 and NaN of -inf, where powers are 0 and inf."""
    edge = (y == 0.5) & ((x == 0) | (x == -np.inf))
    return np.where(edge, np.abs(x), np.power(x, y))


def _product(x: Array, y: Array) -> Array:
    return _underflow(x * y, lambda: np.multiply(x, y, dtype=np.float64))


def _quotient(x: Array, y: Array) -> Array:
    return _underflow(x / y, lambda: np.divide(x, y, dtype=np.float64))


def _underflow(result: Array, exact: Callable[[], Array]) -> Array:
    """f32 results with the smallest ones rounded again from float64, where IEEE's gradual underflow differs from the device's."""
    small = (np.abs(result) <= MIN_NORMAL) & (result != 0)
    return np.where(small, narrow(exact(), F32), result) if small.any() else result


def _maximum(x: Array, y: Array) -> Array:
    return np.where((x == 0) & (y == 0), x + y, np.maximum(x, y))


def _minimum(x: Array, y: Array) -> Array:
    return -_maximum(-x, -y)


# Exact in f32, or rounded to f32 once; the result is then rounded to the operand's type: as good as one rounding (24 >= 2 x 11 + 2).
_FLOAT_UNARY: dict[str, Function] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round_even": np.rint,
    "round_away": _round_away,
    "sqrt": np.sqrt,
}
_FLOAT_BINARY: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": _product,
    "div": _quotient,
    "rem": np.fmod,
    "max": _maximum,
    "min": _minimum,
}
# Computed in float64, then rounded once.
_SPECIAL_UNARY: dict[str, Function] = {
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "cbrt": np.cbrt,
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "erf": _erf,
}
_SPECIAL_BINARY: dict[str, Function] = {"pow": _power, "atan2": np.arctan2}
COMPARE: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _rounded(function: Function) -> Function:
    """An f32 function on the values of any float type, its result rounded to that type."""

    def apply(*operands: Array, dtype: DType) -> Array:
        return from_f32(flush(function(*(widen(x, dtype) for x in operands))), dtype)

    return apply


def _special(function: Function) -> Function:
    """A float64 function on the values of any float type, its result rounded to that type."""

    def apply(*operands: Array, dtype: DType) -> Array:
        return narrow(function(*(widen(x, dtype).astype(np.float64) for x in operands)), dtype)

    return apply


def _with_bits(change: Callable[[Array, Any], Array]) -> Function:
    """A change of the sign bit (its mask is given), NaN written as the canonical one."""

    def apply(a: Array, *, dtype: DType) -> Array:
        word = np.dtype(f"u{dtype.bytes}")
        sign = word.type(1 << (8 * dtype.bytes - 1))
        changed = change(a.view(word), sign).view(dtype.numpy)
        return np.where(np.isnan(a), np.array(np.nan, dtype.numpy), changed)

    return apply


_SIGN: dict[str, Function] = {"neg": _with_bits(np.bitwise_xor), "abs": _with_bits(lambda bits, sign: bits & ~sign)}


def _abs(a: Array) -> Array:
    return np.abs(a) if a.dtype.kind == "i" else a


def _popcnt(a: Array) -> Array:
    return np.bitwise_count(a.view(f"u{a.itemsize}")).astype(a.dtype)


def _clz(a: Array) -> Array:
    length = np.frexp(a.view(f"u{a.itemsize}").astype(np.float64))[1]
    return (8 * a.itemsize - length).astype(a.dtype)


def _div(a: Array, b: Array) -> Array:
    x, y = a.astype(np.int64), b.astype(np.int64)
    size = np.abs(x) // np.where(y == 0, 1, np.abs(y))
    return np.where(y == 0, -1, size * np.sign(x) * np.sign(y)).astype(a.dtype)


def _rem(a: Array, b: Array) -> Array:
    x, y = a.astype(np.int64), b.astype(np.int64)
    size = np.abs(x) % np.where(y == 0, 1, np.abs(y))
    return np.where(y == 0, x, size * np.sign(x)).astype(a.dtype)


def _shift(shift: Function, kind: str, *, saturate: bool) -> Function:
    """A shift of a read as kind "i" or "u"; an amount of the width or more (as unsigned) shifts everything out."""

    def apply(a: Array, b: Array) -> Array:
        width = 8 * a.itemsize
        amount = np.minimum(b.view(f"u{b.itemsize}"), width).astype(np.int64)
        wide = a.view(f"{kind}{a.itemsize}").astype(np.int64)
        shifted = shift(wide, np.minimum(amount, width - 1) if saturate else amount)
        return shifted.astype(np.uint64).astype(f"u{a.itemsize}").view(a.dtype)

    return apply


def _mulhi(a: Array, b: Array) -> Array:
    wide = np.dtype("i8" if a.dtype.kind == "i" else "u8")
    return (a.astype(wide) * b.astype(wide) >> wide.type(8 * a.itemsize)).astype(a.dtype)


_INTEGER_UNARY: dict[str, Function] = {
    "neg": np.negative,
    "abs": _abs,
    "not": np.invert,
    "popcnt": _popcnt,
    "clz": _clz,
}
_INTEGER_BINARY: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _div,
    "rem": _rem,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": _shift(np.left_shift, "u", saturate=False),
    "shr_logical": _shift(np.right_shift, "u", saturate=False),
    "shr_arithmetic": _shift(np.right_shift, "i", saturate=True),
    "mulhi": _mulhi,
}
_PRED_UNARY: dict[str, Function] = {"not": np.logical_not}
_PRED_BINARY: dict[str, Function] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "max": np.logical_or,
    "min": np.logical_and,
}


def _exact(table: dict[str, Function]) -> dict[str, Function]:
    """Functions that need not know the type of what they are given."""
    return {name: lambda *operands, dtype, f=f: f(*operands) for name, f in table.items()}


_FLOATS = {
    "unary": {
        **{name: _rounded(f) for name, f in _FLOAT_UNARY.items()},
        **{name: _special(f) for name, f in _SPECIAL_UNARY.items()},
        **_SIGN,
    },
    "binary": {
        **{name: _rounded(f) for name, f in _FLOAT_BINARY.items()},
        **{name: _special(f) for name, f in _SPECIAL_BINARY.items()},
    },
}
_INTEGERS = {"unary": _exact(_INTEGER_UNARY), "binary": _exact(_INTEGER_BINARY)}
_PREDS = {"unary": _exact(_PRED_UNARY), "binary": _exact(_PRED_BINARY)}
OPERATIONS: dict[str, dict[str, dict[str, Function]]] = {"float": _FLOATS, "int": _INTEGERS, "uint": _INTEGERS, "pred": _PREDS}
