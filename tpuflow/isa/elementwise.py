"""The elementwise operations of the vector and scalar units: one row each.

Instructions, compiler, reference engine and documentation read the row; `device/fast/lax_elementwise.py` has the same operations in lax and
is checked against this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tpuflow.isa import numpy_elementwise as functions
from tpuflow.isa.numpy_elementwise import Function


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation on one or two operands of the same type.

    code: its number in the binary, which is never given to another operation with as many operands. on: kind of element type ("float",
    "int", "uint", "pred") -> the NumPy function, called with arrays and `dtype`; the operation is undefined on other kinds. special: it
    takes a chip's `special_passes` through the vector lanes instead of one. rounds: its results are rounded, not just changed bits.
    """

    name: str
    code: int
    on: Mapping[str, Function]
    special: bool = False
    rounds: bool = True


def _any(function: Function) -> Function:
    """A function that does not depend on `dtype`."""
    return lambda *operands, dtype: function(*operands)


def _float(function: Function) -> dict[str, Function]:
    """Computed in f32 (exact, or rounded once), then rounded to the operands' type. Rounding twice gives the bits of rounding once: f32 has
    24 bits, at least 2 p + 2 for the p = 11 of f16 and the 8 of bf16."""
    return {"float": functions.rounded(function)}


def _special(function: Function) -> dict[str, Function]:
    """Computed in float64, then rounded once."""
    return {"float": functions.rounded_once(function)}


def _integer(function: Function) -> dict[str, Function]:
    return dict.fromkeys(("int", "uint"), _any(function))


def _pred(function: Function) -> dict[str, Function]:
    return {"pred": _any(function)}


_NEGATED, _ABSOLUTE = (functions.with_sign_bit(change) for change in (np.bitwise_xor, lambda bits, sign: bits & ~sign))

UNARY: Mapping[str, Operation] = {
    row.name: row
    for row in (
        Operation("neg", 0, {"float": _NEGATED} | _integer(np.negative), rounds=False),
        Operation("abs", 1, {"float": _ABSOLUTE} | _integer(functions.absolute), rounds=False),
        Operation("floor", 2, _float(np.floor)),
        Operation("ceil", 3, _float(np.ceil)),
        Operation("round_even", 4, _float(np.rint)),
        Operation("round_away", 5, _float(functions.round_away)),
        Operation("sqrt", 6, _float(np.sqrt), special=True),
        Operation("rsqrt", 7, _special(lambda x: 1.0 / np.sqrt(x)), special=True),
        Operation("cbrt", 8, _special(np.cbrt), special=True),
        Operation("exp", 9, _special(np.exp), special=True),
        Operation("expm1", 10, _special(np.expm1), special=True),
        Operation("log", 11, _special(np.log), special=True),
        Operation("log1p", 12, _special(np.log1p), special=True),
        Operation("tanh", 13, _special(np.tanh), special=True),
        Operation("sin", 14, _special(np.sin), special=True),
        Operation("cos", 15, _special(np.cos), special=True),
        Operation("erf", 16, _special(functions.erf), special=True),
        Operation("not", 17, _integer(np.invert) | _pred(np.logical_not)),
        Operation("popcnt", 18, _integer(functions.count_ones)),
        Operation("clz", 19, _integer(functions.count_leading_zeros)),
    )
}
BINARY: Mapping[str, Operation] = {
    row.name: row
    for row in (
        Operation("add", 0, _float(np.add) | _integer(np.add)),
        Operation("sub", 1, _float(np.subtract) | _integer(np.subtract)),
        Operation("mul", 2, _float(functions.product) | _integer(np.multiply)),
        Operation("div", 3, _float(functions.quotient) | _integer(functions.integer_quotient), special=True),
        Operation("rem", 4, _float(np.fmod) | _integer(functions.integer_remainder), special=True),
        Operation("pow", 5, _special(functions.power), special=True),
        Operation("atan2", 6, _special(np.arctan2), special=True),
        Operation("max", 7, _float(functions.maximum) | _integer(np.maximum) | _pred(np.logical_or)),
        Operation("min", 8, _float(functions.minimum) | _integer(np.minimum) | _pred(np.logical_and)),
        Operation("and", 9, _integer(np.bitwise_and) | _pred(np.logical_and)),
        Operation("or", 10, _integer(np.bitwise_or) | _pred(np.logical_or)),
        Operation("xor", 11, _integer(np.bitwise_xor) | _pred(np.logical_xor)),
        Operation("shl", 12, _integer(functions.shift(np.left_shift, "u", saturate=False))),
        Operation("shr_logical", 13, _integer(functions.shift(np.right_shift, "u", saturate=False))),
        Operation("shr_arithmetic", 14, _integer(functions.shift(np.right_shift, "i", saturate=True))),
        Operation("mulhi", 15, _integer(functions.high_product)),
    )
}
OPERATIONS: Mapping[str, Operation] = {**UNARY, **BINARY}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison: its number in the binary, and what it computes of arrays of one type, short floats as f32."""

    code: int
    function: Function


COMPARE: Mapping[str, Comparison] = {
    "eq": Comparison(0, np.equal),
    "ne": Comparison(1, np.not_equal),
    "lt": Comparison(2, np.less),
    "le": Comparison(3, np.less_equal),
    "gt": Comparison(4, np.greater),
    "ge": Comparison(5, np.greater_equal),
}
REDUCE: Mapping[str, int] = {"add": 0, "mul": 1, "max": 2, "min": 3, "and": 4, "or": 5, "xor": 6}
CUMULATIVE: Mapping[str, int] = {"add": 0, "mul": 1, "max": 2, "min": 3}
"""Operations of `BINARY` that combine the elements of an axis -> their numbers in the binary."""


def codes(table: Mapping[str, Operation] | Mapping[str, Comparison]) -> dict[str, int]:
    """Name -> number in the binary."""
    return {name: row.code for name, row in table.items()}
