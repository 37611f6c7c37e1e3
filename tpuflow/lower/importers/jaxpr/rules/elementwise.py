"""Rules of elementwise primitives."""

from __future__ import annotations

from typing import Any

from tpuflow.dtypes import from_numpy as dtype_of
from tpuflow.isa.elementwise import OPERATIONS
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.importers.jaxpr.registry import bound, enter, lowers
from tpuflow.lower.operations import elementwise, special
from tpuflow.lower.operations.elementwise import aligned

_RENAMED = {
    "popcnt": "population_count", "shl": "shift_left", "shr_logical": "shift_right_logical", "shr_arithmetic": "shift_right_arithmetic",
}  # fmt: skip
"""Operations of the device under another name than the primitive's."""
_OTHERWISE = ("max", "min", "pow", "round_even", "round_away")
"""Operations with a rule of their own below, instead of the generic one."""
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")


def _node(b: Builder, op: str, *operands: Value) -> Value:
    return b.emit(op, aligned(b, *operands)).result


enter({_RENAMED.get(op, op): bound(_node, op) for op in (*OPERATIONS, "is_finite") if op not in _OTHERWISE})
enter({"add_any": bound(_node, "add")})
enter({direction: bound(elementwise.compare, direction) for direction in _COMPARE})
enter({f"{direction}_to": bound(elementwise.compare_in_total_order, direction) for direction in ("eq", "le", "lt")})
enter({
    "max": elementwise.maximum, "min": elementwise.minimum, "pow": elementwise.power, "integer_pow": elementwise.integer_pow,
    "sign": elementwise.sign, "square": elementwise.square, "logistic": elementwise.logistic, "clamp": elementwise.clamp,
    "select_n": elementwise.select_n, "nextafter": elementwise.nextafter, "reduce_precision": elementwise.reduce_precision,
    "exp2": special.exp2, "tan": special.tan, "sinh": special.sinh, "cosh": special.cosh, "asin": special.asin, "acos": special.acos,
    "atan": special.atan, "asinh": special.asinh, "acosh": special.acosh, "atanh": special.atanh, "erfc": special.erfc,
    "erf_inv": special.erf_inv, "lgamma": special.lgamma, "digamma": special.digamma, "zeta": special.zeta,
    "polygamma": special.polygamma, "bessel_i1e": special.bessel_i1e,
})  # fmt: skip


@lowers("round")
def _round(b: Builder, x: Value, *, rounding_method: Any) -> Value:
    return b.round_even(x) if rounding_method.name == "TO_NEAREST_EVEN" else b.round_away(x)


@lowers("convert_element_type")
def _convert_element_type(b: Builder, x: Value, *, new_dtype: Any) -> Value:
    return b.convert(x, dtype_of(new_dtype))


@lowers("bitcast_convert_type")
def _bitcast_convert_type(b: Builder, x: Value, *, new_dtype: Any) -> Value:
    return elementwise.bitcast_convert(b, x, dtype_of(new_dtype))
