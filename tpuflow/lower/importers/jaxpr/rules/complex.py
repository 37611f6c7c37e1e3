"""Rules of complex numbers, and of Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from tpuflow.dtypes import F32
from tpuflow.dtypes import from_numpy as dtype_of
from tpuflow.jaxprs.calls import CALLS
from tpuflow.jaxprs.compat import ClosedJaxpr
from tpuflow.jaxprs.expansions import COMPLEX_EXPANSIONS
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.importers.jaxpr.importer import inline
from tpuflow.lower.importers.jaxpr.registry import COMPLEX, PLANEWISE, RULES, STORED, STRUCTURAL
from tpuflow.lower.importers.jaxpr.rules import products  # noqa: F401  (whose rules are used here)
from tpuflow.lower.importers.jaxpr.rules.indexing import slice_axes
from tpuflow.lower.importers.jaxpr.rules.reductions import each_element, halves, monoid
from tpuflow.lower.operations import complex as numbers
from tpuflow.lower.operations import complex_inverses as inverses
from tpuflow.lower.operations import complex_powers as powers
from tpuflow.lower.operations import complex_reductions as reduced
from tpuflow.lower.operations import movement, reductions, sorting, windows
from tpuflow.lower.operations.complex import Complex, Number, bilinear, plane_by_plane
from tpuflow.lower.operations.fft import fft
from tpuflow.lower.operations.scatter_by import scatter_by
from tpuflow.lower.operations.window import Padding, Sizes, SlidingWindow

STRUCTURAL.update(CALLS, (
    "cond", "while", "scan", "optimization_barrier", "copy", "stop_gradient", "device_put", "sharding_constraint", "layout_constraint",
    "reshard", "name", "pvary", "stage", "tie", "dce_sink", "shard_map", "call_exported",
))  # fmt: skip
STORED.update((
    "all_gather", "all_to_all", "bitcast_convert_type", "broadcast_in_dim", "concatenate", "conv_general_dilated", "convert_element_type",
    "dot_general", "dynamic_slice", "dynamic_update_slice", "empty", "empty2", "gather", "iota", "nextafter", "pad", "pbroadcast",
    "ppermute", "reshape", "rev", "scatter", "select_n", "slice", "sort", "split", "squeeze", "stack", "tile", "transpose", "unstack",
))  # fmt: skip
PLANEWISE.update((
    "add", "add_any", "all_gather", "all_to_all", "broadcast_in_dim", "concatenate", "cumsum", "dynamic_slice", "dynamic_update_slice",
    "gather", "neg", "pad", "pbroadcast", "ppermute", "psum", "psum_invariant", "reduce_precision", "reduce_sum", "reduce_window_sum",
    "reshape", "rev", "scatter-add", "scatter-sub", "select_n", "slice", "split", "squeeze", "stack", "sub", "tile", "transpose",
    "unstack", "reduce_scatter",
))  # fmt: skip
COMPLEX.enter({
    "real": numbers.real, "imag": numbers.imag, "complex": numbers.make, "mul": numbers.mul, "div": numbers.div, "abs": numbers.absolute,
    "sign": numbers.sign_of, "is_finite": numbers.is_finite, "eq": numbers.eq, "ne": numbers.ne, "exp": numbers.exp, "log": powers.log,
    "log1p": powers.log1p, "exp2": numbers.exp2, "expm1": numbers.expm1, "tan": numbers.tan, "sinh": numbers.sinh_of,
    "cosh": numbers.cosh_of, "tanh": numbers.tanh, "logistic": numbers.logistic, "sqrt": powers.sqrt, "rsqrt": powers.rsqrt,
    "square": numbers.square, "pow": powers.power, "integer_pow": numbers.integer_pow, "reduce_prod": reduced.reduce_prod,
    "cumprod": reduced.cumprod, "cumlogsumexp": reduced.cumlogsumexp, "clamp": reduced.clamp, "atan2": powers.atan2,
    "asin": inverses.asin, "acos": inverses.acos, "atan": inverses.atan, "asinh": inverses.asinh, "acosh": inverses.acosh,
    "atanh": inverses.atanh, "bitcast_convert_type": numbers.same_bits,
})  # fmt: skip


def _first_place_of(b: Builder, x: Complex, *, op: str, axes: Sizes, index_dtype: Any) -> Value:
    return reduced.first_place_of(b, op, x, axes[0], dtype_of(index_dtype))


for _op in ("max", "min"):
    COMPLEX.enter({
        _op: partial(reduced.extreme, op=_op), f"reduce_{_op}": partial(reduced.reduce_extreme, op=_op),
        f"cum{_op}": partial(reduced.cumulative_extreme, op=_op), f"arg{_op}": partial(_first_place_of, op=_op),
    })  # fmt: skip


@COMPLEX.lowers("sort")
def _sort(b: Builder, *operands: Number, dimension: int, num_keys: int) -> tuple[Number, ...]:
    """By the real part, then by the imaginary one."""
    arrays = sorting.sort(b, numbers.planes(operands), dimension, len(numbers.planes(operands[:num_keys])))
    return numbers.packed(arrays, [x.type for x in operands])


@COMPLEX.lowers("reduce")
def _reduce(b: Builder, *operands: Number, jaxpr: Any, dimensions: Sizes) -> tuple[Number, ...]:
    """Sums with each plane, anything else with both at once."""
    if monoid(jaxpr) == "add":
        return plane_by_plane(b, lambda b, x, start: reductions.reduce(b, "add", x, dimensions, start), operands)
    return reduced.reduce_by(b, each_element(jaxpr), *halves(operands), dimensions)


@COMPLEX.lowers("reduce_window")
def _reduce_window(
    b: Builder, *operands: Number, jaxpr: Any, window_dimensions: Sizes, window_strides: Sizes, padding: Padding, base_dilation: Sizes,
    window_dilation: Sizes,
) -> tuple[Number, ...]:  # fmt: skip
    """Sums with each plane, anything else element by element."""
    window = SlidingWindow.of(window_dimensions, window_strides, padding, base_dilation, window_dilation)
    if monoid(jaxpr) == "add":
        return plane_by_plane(b, lambda b, x, start: windows.reduce_window(b, "add", x, window, start), operands)
    return reduced.reduce_window_by(b, each_element(jaxpr), *halves(operands), window)


def _window_extreme(
    b: Builder, x: Complex, *, op: str, window_dimensions: Sizes, window_strides: Sizes, padding: Padding, base_dilation: Sizes,
    window_dilation: Sizes,
) -> tuple[Number, ...]:  # fmt: skip
    """The largest ("max") or smallest ("min") element of every window, as `extreme` orders them."""
    window = SlidingWindow.of(window_dimensions, window_strides, padding, base_dilation, window_dilation)
    worst = b.scalar(math.inf if op == "min" else -math.inf)
    step = partial(reduced.extreme, op=op)
    return reduced.reduce_window_by(b, lambda b, x, y: (step(b, x, y),), (x,), (Complex(worst, worst),), window)


for _op in ("max", "min"):
    COMPLEX.enter({f"reduce_window_{_op}": partial(_window_extreme, op=_op)})


@COMPLEX.lowers("conj")
def _conj(b: Builder, x: Number) -> Complex:
    return numbers.conj(b, x)


@COMPLEX.lowers("convert_element_type")
def _convert(b: Builder, x: Number, *, new_dtype: Any) -> Number:
    return numbers.convert(b, x, None if np.dtype(new_dtype).kind == "c" else dtype_of(new_dtype))


def _scatter(b: Builder, *operands: Number, **params: Any) -> tuple[Number, ...]:
    """A plain scatter acts plane by plane; one with a function (x.at[...].apply) on both planes at once."""
    function = params["update_jaxpr"]
    if function is None or not function.eqns:
        return plane_by_plane(b, lambda b, *arrays: RULES["scatter"](b, *arrays, params=params), operands)
    changes = each_element(ClosedJaxpr(function, params.get("update_consts", ())))
    return (_changed(b, changes, operands, params["dimension_numbers"], params["mode"], apart=params.get("unique_indices", False)),)


COMPLEX.enter({"scatter": _scatter}, **{parameter: parameter for parameter, _ in RULES["scatter"].params})


def _scatter_with(step: Callable[..., Complex]) -> Callable[..., Complex]:
    """The rule of a scatter that combines what is there with the updates."""

    def rule(
        b: Builder, operand: Complex, indices: Value, updates: Complex, *, dimension_numbers: Any, mode: Any, unique_indices: bool = False
    ) -> Complex:
        return _changed(
            b, lambda b, x, y: (step(b, x, y),), (operand, indices, updates), dimension_numbers, mode, apart=unique_indices
        )  # fmt: skip

    return rule


COMPLEX.enter({
    "scatter-mul": _scatter_with(numbers.mul), "scatter-max": _scatter_with(partial(reduced.extreme, op="max")),
    "scatter-min": _scatter_with(partial(reduced.extreme, op="min")),
})  # fmt: skip


def _changed(
    b: Builder, function: Callable[..., Sequence[Number]], operands: Sequence[Number], dimension_numbers: Any, mode: Any, *, apart: bool
) -> Complex:
    """A scatter that replaces slices by function(slices, updates)."""
    operand, indices, updates = operands
    assert isinstance(indices, Value)

    def body(b: Builder, *arrays: Value) -> list[Value]:
        return numbers.planes(function(b, Complex(*arrays[:2]), Complex(*arrays[2:])))

    old, new, axes = numbers.planes([operand]), numbers.planes([updates]), slice_axes(dimension_numbers)
    return Complex(*scatter_by(b, body, old, indices, new, axes, clip=mode.name == "CLIP", apart=apart))


@COMPLEX.lowers("iota")
def _iota(b: Builder, *, shape: Sequence[int], dimension: int) -> Complex:
    return numbers.as_complex(b, movement.iota(b, F32, shape, dimension))


@COMPLEX.lowers("fft")
def _fft(b: Builder, x: Number, *, fft_type: Any, fft_lengths: Sequence[int]) -> Number:
    return fft(b, x, kind=fft_type.name, lengths=fft_lengths)


def _expanded(name: str) -> Callable[..., Number]:
    """The rule of a primitive that is expanded by JAX's own decomposition."""

    def rule(b: Builder, x: Complex) -> Number:
        (result,) = inline(b, COMPLEX_EXPANSIONS[name](jax.ShapeDtypeStruct(x.shape, np.complex64)), (x,))
        return result

    return rule


COMPLEX.enter({name: _expanded(name) for name in COMPLEX_EXPANSIONS})


def _product(name: str) -> Callable[..., Complex]:
    """The rule of a primitive that is linear in both operands: four times that of real numbers."""

    def rule(b: Builder, x: Number, y: Number, **params: Any) -> Complex:
        def once(p: Value, q: Value) -> Value:
            (result,) = RULES[name](b, p, q, params={**params, "preferred_element_type": None})
            return result

        return bilinear(b, once, x, y)

    return rule


for _name in ("dot_general", "conv_general_dilated"):
    COMPLEX.enter({_name: _product(_name)}, **{parameter: parameter for parameter, _ in RULES[_name].params})
