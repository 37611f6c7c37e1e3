"""The device's elementwise operations in lax: the table that goes with that of `isa.elementwise`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.device.fast.lax_rounding import Rounding, flush, flushed, not_in_libraries, quiet, widen, widen64, x64
from tpuflow.dtypes import DType
from tpuflow.isa import elementwise

Value = Any
Function = Callable[..., Value]

# Exact in f32, or rounded to f32 once by the hardware.
_ROUNDED_UNARY: dict[str, Function] = {
    "floor": lax.floor,
    "ceil": lax.ceil,
    "round_even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "round_away": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "sqrt": lax.sqrt,
}
_ROUNDED_BINARY: dict[str, Function] = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "rem": lambda x, y: flush(lax.rem(flush(x), flush(y))),  # fmod is a library call on bits: it does not flush
    "max": lax.max,
    "min": lax.min,
}
_HANDS_THROUGH = ("max", "min")  # instructions for these may return a subnormal operand as it is
_REPRESENTABLE = (*_HANDS_THROUGH, "floor", "ceil", "round_even", "round_away", "rem")  # results are numbers of the operands' type
# Bit-exact: computed in float64 and rounded once. Native: XLA's own f32 function.
_SPECIAL: dict[str, Function] = {
    "rsqrt": lax.rsqrt,
    "cbrt": lax.cbrt,
    "exp": lax.exp,
    "expm1": lax.expm1,
    "log": lax.log,
    "log1p": lax.log1p,
    "tanh": lax.tanh,
    "sin": lax.sin,
    "cos": lax.cos,
    "erf": lax.erf,
    "pow": lax.pow,
    "atan2": lax.atan2,
}
# How the native functions are given their operands: some tell a subnormal from zero now and then, pow a signalling NaN from a quiet one.
_READ: dict[str, Function] = {"cbrt": flushed, "atan2": flushed, "pow": lambda x, dtype: quiet(flushed(x, dtype))}
# Operands that LLVM is not to know: of atan2 with a known 1 it makes atan, a wrong one in vectors of 512 bits (jaxlib 0.10.2, AVX512).
_UNKNOWN: dict[str, tuple[int, ...]] = {"atan2": (1,)}
_EXACT: dict[str, Function] = {"rsqrt": lambda x: lax.div(jnp.ones_like(x), lax.sqrt(x))}
_SIGN: dict[str, Function] = {"neg": lax.neg, "abs": lax.abs}

COMPARE: dict[str, Function] = {"eq": lax.eq, "ne": lax.ne, "lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge}


def _rounded(name: str, function: Function) -> Function:
    native = _xla_s_own(function) if name in _HANDS_THROUGH else function

    def apply(rounding: Rounding, dtype: DType, *operands: Value) -> Value:
        read = flushed if rounding.bitexact and name in _HANDS_THROUGH else widen
        result = (function if rounding.bitexact else native)(*(read(x, dtype) for x in operands))
        if name in _REPRESENTABLE:
            return rounding.representable(result, dtype)
        return rounding.from_f32(rounding.hide(result) if name == "mul" else result, dtype, of_own=True)

    return apply


def _xla_s_own(function: Function) -> Function:
    """A function of f32 as XLA:CPU makes it, which is not to hand it to YNNPACK with a sum before or after it: maxima there lose NaN."""
    return lambda *operands: not_in_libraries(function(*map(not_in_libraries, operands)))


def _special(name: str) -> Function:
    def apply(rounding: Rounding, dtype: DType, *operands: Value) -> Value:
        if not rounding.bitexact:
            read = _READ.get(name, widen)
            given = [rounding.unknown(read(x, dtype)) if n in _UNKNOWN.get(name, ()) else read(x, dtype) for n, x in enumerate(operands)]
            return rounding.from_f32(_SPECIAL[name](*given), dtype)
        with x64():
            function = _EXACT.get(name, _SPECIAL[name])
            return rounding.narrow(function(*(widen64(x, dtype) for x in operands)), dtype)

    return apply


def _sign(function: Function) -> Function:
    return lambda rounding, dtype, a: rounding.representable(function(widen(a, dtype)), dtype)


def _plain(function: Function) -> Function:
    return lambda rounding, dtype, *operands: function(*operands)


def _mulhi(a: Value, b: Value) -> Value:
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    with x64():
        product = lax.mul(lax.convert_element_type(a, wide), lax.convert_element_type(b, wide))
        return lax.convert_element_type(lax.shift_right_arithmetic(product, jnp.full_like(product, 8 * a.dtype.itemsize)), a.dtype)


_INTEGER: dict[str, Function] = {
    "neg": lax.neg,
    "abs": lambda a: lax.abs(a) if a.dtype.kind == "i" else a,
    "not": lax.bitwise_not,
    "popcnt": lax.population_count,
    "clz": lax.clz,
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "rem": lax.rem,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "shl": lax.shift_left,
    "shr_logical": lax.shift_right_logical,
    "shr_arithmetic": lax.shift_right_arithmetic,
    "mulhi": _mulhi,
}
_PRED: dict[str, Function] = {
    "not": lax.bitwise_not,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "max": lax.bitwise_or,
    "min": lax.bitwise_and,
}

_INTEGERS = {name: _plain(f) for name, f in _INTEGER.items()}
OPERATIONS: dict[str, dict[str, Function]] = {
    "float": {
        **{name: _rounded(name, f) for name, f in (_ROUNDED_UNARY | _ROUNDED_BINARY).items()},
        **{name: _special(name) for name in _SPECIAL},
        **{name: _sign(f) for name, f in _SIGN.items()},
    },
    "int": _INTEGERS,
    "uint": _INTEGERS,
    "pred": {name: _plain(f) for name, f in _PRED.items()},
}

for _kind, _functions in OPERATIONS.items():
    if _differing := set(_functions) ^ {row.name for row in elementwise.OPERATIONS.values() if _kind in row.on}:
        raise TypeError(f"operations on {_kind} that isa.elementwise or lax_elementwise alone has: {', '.join(sorted(_differing))}")
