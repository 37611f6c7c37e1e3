"""Operations element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpuflow.torch.table import lowers

_UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": jnp.abs,
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "bitwise_not": jnp.invert,
    "ceil": jnp.ceil,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "digamma": jax.scipy.special.digamma,
    "erf": jax.scipy.special.erf,
    "erfc": jax.scipy.special.erfc,
    "erfinv": jax.scipy.special.erfinv,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "floor": jnp.floor,
    "isfinite": jnp.isfinite,
    "isinf": jnp.isinf,
    "isnan": jnp.isnan,
    "lgamma": jax.scipy.special.gammaln,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "logical_not": jnp.logical_not,
    "neg": jnp.negative,
    "reciprocal": lambda x: 1.0 / x,
    "relu": lambda x: jnp.where(x <= 0, jnp.zeros_like(x), x),  # a NaN stays one
    "round": jnp.round,
    "rsqrt": lax.rsqrt,
    "sigmoid": jax.nn.sigmoid,
    "sign": jnp.sign,
    "sin": jnp.sin,
    "sinh": jnp.sinh,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
    "trunc": jnp.trunc,
}
_FLOAT_RESULT = {
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "digamma", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "lgamma",
    "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh",
}  # fmt: skip
"""Of integers these give floats."""
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "atan2": jnp.arctan2,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_left_shift": jnp.left_shift,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_right_shift": jnp.right_shift,
    "bitwise_xor": jnp.bitwise_xor,
    "copysign": jnp.copysign,
    "eq": jnp.equal,
    "floor_divide": jnp.floor_divide,
    "fmax": jnp.fmax,
    "fmin": jnp.fmin,
    "fmod": jnp.fmod,
    "ge": jnp.greater_equal,
    "gt": jnp.greater,
    "le": jnp.less_equal,
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
    "lt": jnp.less,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "mul": jnp.multiply,
    "ne": jnp.not_equal,
    "nextafter": jnp.nextafter,
    "remainder": jnp.remainder,
}
_ROUNDED = {None: jnp.true_divide, "floor": jnp.floor_divide, "trunc": lambda a, b: _truncated(a, b)}
_BINARY_FORMS = ("Tensor", "Scalar", "Scalar_Tensor", "default")


def _enter(name: str, function: Callable[[Any], Any]) -> None:
    @lowers(f"aten.{name}.default")
    def row(x: Any) -> Any:
        return function(as_float(x) if name in _FLOAT_RESULT else x)


for _name, _function in _UNARY.items():
    _enter(_name, _function)
for _name, _binary in _BINARY.items():
    lowers(*(f"aten.{_name}.{form}" for form in _BINARY_FORMS))(_binary)


def as_float(x: Any) -> Any:
    """Integers and booleans in fp32, the default type of floats; floats as they are."""
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)


def _truncated(a: Any, b: Any) -> Any:
    dtype = jnp.result_type(a, b)
    if not jnp.issubdtype(dtype, jnp.integer):
        return jnp.trunc(jnp.true_divide(a, b))
    return lax.div(*(x.astype(dtype) for x in jnp.broadcast_arrays(a, b)))


@lowers("aten.add.Tensor", "aten.add.Scalar")
def _add(a: Any, b: Any, alpha: float = 1) -> Any:
    return jnp.add(a, b if alpha == 1 else jnp.multiply(b, alpha))


@lowers("aten.sub.Tensor", "aten.sub.Scalar")
def _sub(a: Any, b: Any, alpha: float = 1) -> Any:
    return jnp.subtract(a, b if alpha == 1 else jnp.multiply(b, alpha))


@lowers("aten.rsub.Tensor", "aten.rsub.Scalar")
def _rsub(a: Any, b: Any, alpha: float = 1) -> Any:
    return _sub(b, a, alpha)


@lowers("aten.div.Tensor", "aten.div.Scalar", "aten.div.Tensor_mode", "aten.div.Scalar_mode", "aten.true_divide.Tensor")
def _div(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    return _ROUNDED[rounding_mode](a, b)


@lowers("aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar")
def _pow(a: Any, b: Any) -> Any:
    """Small whole powers of floats are products, as PyTorch computes them."""
    if not isinstance(b, (int, float)):
        return jnp.power(a, b)
    if b == 0.5:
        return jnp.sqrt(as_float(a))
    whole = float(b).is_integer() and abs(b) <= 8
    return lax.integer_pow(a if b >= 0 else as_float(a), int(b)) if whole else jnp.power(as_float(a), b)


@lowers("aten.clamp.default", "aten.clamp.Tensor")
def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    """The lower bound first: where they cross, the upper one holds."""
    x = x if low is None else jnp.maximum(x, low)
    return x if high is None else jnp.minimum(x, high)


@lowers("aten.clamp_min.default", "aten.clamp_min.Tensor")
def _clamp_min(x: Any, low: Any) -> Any:
    return jnp.maximum(x, low)


@lowers("aten.clamp_max.default", "aten.clamp_max.Tensor")
def _clamp_max(x: Any, high: Any) -> Any:
    return jnp.minimum(x, high)


@lowers("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def _where(condition: Any, a: Any, b: Any) -> Any:
    return jnp.where(condition, a, b)


@lowers("aten.round.decimals")
def _round_decimals(x: Any, decimals: int) -> Any:
    return jnp.round(x, decimals)


@lowers("aten.signbit.default")
def _signbit(x: Any) -> Any:
    return jnp.signbit(x)


@lowers(
    "aten._to_copy.default", "aten.alias.default", "aten.clone.default", "aten.contiguous.default", "aten.detach.default",
    "aten.lift_fresh_copy.default", "aten.lift_fresh.default", "aten.lift.default", "aten.view_of.default",
    "prims.convert_element_type.default", "prims.device_put.default",
)  # fmt: skip
def _same(x: Any, *_: Any, **__: Any) -> Any:
    """A new element type is given to every result by what PyTorch says of it."""
    return x


@lowers("aten.copy.default")
def _copy(x: Any, source: Any, non_blocking: bool = False) -> Any:
    return jnp.broadcast_to(source, x.shape)


@lowers("aten.gelu.default")
def _gelu(x: Any, approximate: str = "none") -> Any:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


@lowers("aten.hardtanh.default")
def _hardtanh(x: Any, low: float = -1.0, high: float = 1.0) -> Any:
    return jnp.clip(x, low, high)


@lowers("aten.leaky_relu.default")
def _leaky_relu(x: Any, slope: float = 0.01) -> Any:
    return jnp.where(x > 0, x, x * slope)


@lowers("aten.elu.default")
def _elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    safe = jnp.where(x > 0, jnp.zeros_like(x), x)
    return jnp.where(x > 0, x * scale, jnp.expm1(safe * input_scale) * (alpha * scale))
