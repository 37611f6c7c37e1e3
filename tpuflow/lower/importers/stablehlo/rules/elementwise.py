"""Rules of elementwise operations, StableHLO's and CHLO's."""

from __future__ import annotations

from tpuflow.dtypes import PRED
from tpuflow.isa.elementwise import OPERATIONS
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.importers.registry import bound
from tpuflow.lower.importers.stablehlo.patterns import EXP2, LOGISTIC, THREEFRY
from tpuflow.lower.importers.stablehlo.walk import RULES
from tpuflow.lower.operations import elementwise, random, special
from tpuflow.lower.operations.elementwise import aligned

_RENAMED = {
    "sub": "subtract", "mul": "multiply", "div": "divide", "rem": "remainder", "neg": "negate", "exp": "exponential",
    "expm1": "exponential_minus_one", "log1p": "log_plus_one", "sin": "sine", "cos": "cosine", "clz": "count_leading_zeros",
    "round_away": "round_nearest_afz", "round_even": "round_nearest_even", "shl": "shift_left", "shr_logical": "shift_right_logical",
    "shr_arithmetic": "shift_right_arithmetic",
}  # fmt: skip
"""Operations of the device under another name than StableHLO's."""
_CHLO = ("erf", "mulhi")
"""Operations of the device that CHLO has and StableHLO has not."""
_OTHERWISE = ("max", "min", "pow", "add", "mul", *_CHLO)
"""Operations with a rule of their own below, instead of the generic one."""
_ON_PRED = {"add": "or", "mul": "and"}


def _node(b: Builder, op: str, *operands: Value) -> Value:
    return b.emit(op, operands).result


def _arithmetic(b: Builder, op: str, x: Value, y: Value) -> Value:
    """Truth values are added by `or` and multiplied by `and`."""
    return b.emit(_ON_PRED[op] if x.dtype == PRED else op, (x, y)).result


RULES.enter({f"stablehlo.{_RENAMED.get(op, op)}": bound(_node, op) for op in (*OPERATIONS, "is_finite") if op not in _OTHERWISE})
RULES.enter({f"chlo.{op}": bound(_node, op) for op in _CHLO})
RULES.enter({"mhlo.erf": bound(_node, "erf")})  # as it is after XLA's passes
RULES.enter({"stablehlo.add": bound(_arithmetic, "add"), "stablehlo.multiply": bound(_arithmetic, "mul")})
RULES.enter({
    "stablehlo.maximum": elementwise.maximum, "stablehlo.minimum": elementwise.minimum, "stablehlo.power": elementwise.power,
    "stablehlo.sign": elementwise.sign, "stablehlo.clamp": elementwise.clamp,
    "stablehlo.tan": special.tan, "stablehlo.reduce_precision": elementwise.reduce_precision,
})  # fmt: skip
RULES.enter({EXP2: special.exp2, LOGISTIC: elementwise.logistic, THREEFRY: random.threefry2x32})
RULES.enter({
    "chlo.square": elementwise.square, "chlo.next_after": elementwise.nextafter, "chlo.tan": special.tan, "chlo.sinh": special.sinh,
    "chlo.cosh": special.cosh, "chlo.asin": special.asin, "chlo.acos": special.acos, "chlo.atan": special.atan,
    "chlo.asinh": special.asinh, "chlo.acosh": special.acosh, "chlo.atanh": special.atanh, "chlo.erfc": special.erfc,
    "chlo.erf_inv": special.erf_inv, "chlo.lgamma": special.lgamma, "chlo.digamma": special.digamma, "chlo.zeta": special.zeta,
    "chlo.polygamma": special.polygamma, "chlo.bessel_i1e": special.bessel_i1e,
})  # fmt: skip


@RULES.lowers("stablehlo.compare")
def _compare(b: Builder, x: Value, y: Value, *, comparison_direction: str, compare_type: str = "") -> Value:
    compare = elementwise.compare_in_total_order if compare_type == "TOTALORDER" else elementwise.compare
    return compare(b, comparison_direction.lower(), x, y)


@RULES.lowers("stablehlo.select")
def _select(b: Builder, which: Value, on_true: Value, on_false: Value) -> Value:
    return b.select(*aligned(b, which, on_true, on_false))


@RULES.lowers("stablehlo.convert")
def _convert(b: Builder, x: Value, *, types: tuple[TensorType]) -> Value:
    return b.convert(x, types[0].dtype)


@RULES.lowers("stablehlo.bitcast_convert")
def _bitcast_convert(b: Builder, x: Value, *, types: tuple[TensorType]) -> Value:
    return elementwise.bitcast_convert(b, x, types[0].dtype)
