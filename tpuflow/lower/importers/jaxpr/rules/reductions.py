"""Rules of reductions, whole and windowed, prefix scans and sorts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from tpuflow.dtypes import from_numpy as dtype_of
from tpuflow.jaxprs.calls import PLAIN_CALLS, called
from tpuflow.jaxprs.compat import ClosedJaxpr, jaxpr_as_fun, opened
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.importers.jaxpr.importer import inline
from tpuflow.lower.importers.jaxpr.registry import bound, enter, lowers
from tpuflow.lower.operations import reductions, sorting, windows
from tpuflow.lower.operations.complex import Complex, Number, planes
from tpuflow.lower.operations.forms import Body, UnsupportedForm
from tpuflow.lower.operations.pooling_gradients import select_and_gather_add, select_and_scatter
from tpuflow.lower.operations.reducers import reduce_by, reduce_window_by
from tpuflow.lower.operations.window import Padding, Sizes, SlidingWindow

_REDUCE = {
    "reduce_sum": "add", "reduce_prod": "mul", "reduce_max": "max", "reduce_min": "min",
    "reduce_and": "and", "reduce_or": "or", "reduce_xor": "xor",
}  # fmt: skip
_CUMULATIVE = {"cumsum": "add", "cumprod": "mul", "cummax": "max", "cummin": "min"}
_WINDOWED = {"reduce_window_sum": "add", "reduce_window_max": "max", "reduce_window_min": "min"}
_MONOIDS = {"add": "add", "add_any": "add", "mul": "mul", "max": "max", "min": "min", "and": "and", "or": "or", "xor": "xor"}
Item = TypeVar("Item")


def _reduce_window_by(
    b: Builder, op: str, x: Value, *, window_dimensions: Sizes, window_strides: Sizes, padding: Padding, base_dilation: Sizes,
    window_dilation: Sizes,
) -> Value:  # fmt: skip
    return windows.reduce_window(b, op, x, SlidingWindow.of(window_dimensions, window_strides, padding, base_dilation, window_dilation))


def _first_place_of(b: Builder, op: str, x: Value, *, axes: Sizes, index_dtype: Any) -> Value:
    return reductions.first_place_of(b, op, x, axes[0], dtype_of(index_dtype))


enter({primitive: bound(reductions.reduce, op) for primitive, op in _REDUCE.items()}, axes="axes")
enter({primitive: bound(reductions.cumulative, op) for primitive, op in _CUMULATIVE.items()})
enter({primitive: bound(_reduce_window_by, op) for primitive, op in _WINDOWED.items()})
enter({"argmax": bound(_first_place_of, "max"), "argmin": bound(_first_place_of, "min")})
enter({"cumlogsumexp": reductions.cumlogsumexp, "top_k": sorting.top_k})


@lowers("reduce")
def _reduce(b: Builder, *operands: Value, jaxpr: Any, dimensions: Sizes) -> Value | tuple[Value, ...]:
    if (op := monoid(jaxpr)) is None:
        return reduce_by(b, elementwise(jaxpr), *halves(operands), dimensions)
    x, start = operands
    return reductions.reduce(b, op, x, dimensions, start)


@lowers("reduce_window")
def _reduce_window(
    b: Builder, *operands: Value, jaxpr: Any, window_dimensions: Sizes, window_strides: Sizes, padding: Padding, base_dilation: Sizes,
    window_dilation: Sizes,
) -> Value | tuple[Value, ...]:  # fmt: skip
    window = SlidingWindow.of(window_dimensions, window_strides, padding, base_dilation, window_dilation)
    if (op := monoid(jaxpr)) is None:
        return reduce_window_by(b, elementwise(jaxpr), *halves(operands), window)
    x, start = operands
    return windows.reduce_window(b, op, x, window, start)


def halves(operands: Sequence[Item]) -> tuple[Sequence[Item], Sequence[Item]]:
    """Arrays and their starting values."""
    return operands[: len(operands) // 2], operands[len(operands) // 2 :]


def monoid(jaxpr: Any) -> str | None:
    """The reduction that a reducer's jaxpr means, if that is one known operation on its two arguments."""
    inner, _ = opened(jaxpr)
    if len(inner.eqns) != 1 or len(inner.outvars) != 1 or set(map(id, inner.eqns[0].invars)) != set(map(id, inner.invars)):
        return None
    (equation,) = inner.eqns
    return monoid(called(equation)) if equation.primitive.name in PLAIN_CALLS else _MONOIDS.get(equation.primitive.name)


def elementwise(jaxpr: Any) -> Body:
    """A jaxpr on real scalars, as a body that goes element by element through arrays of one shape."""
    function = each_element(jaxpr)
    return lambda b, *values: planes(function(b, *values))


def each_element(jaxpr: Any) -> Callable[..., tuple[Number, ...]]:
    """A jaxpr on scalars, which may be complex, element by element through values of one shape."""
    scalar = jaxpr_as_fun(ClosedJaxpr(*opened(jaxpr)))

    @functools.cache
    def on_arrays(*specs: jax.ShapeDtypeStruct) -> ClosedJaxpr:
        with jax.disable_jit(False):
            return jax.make_jaxpr(functools.reduce(lambda function, _: jax.vmap(function), specs[0].shape, scalar))(*specs)

    def body(b: Builder, *values: Number) -> tuple[Number, ...]:
        return inline(b, on_arrays(*(jax.ShapeDtypeStruct(v.shape, _numpy(v)) for v in values)), values)

    return body


def _numpy(value: Number) -> Any:
    """The type of the elements of a value in NumPy."""
    return np.complex64 if isinstance(value, Complex) else value.dtype.numpy


@lowers("select_and_scatter_add")
def _select_and_scatter_add(
    b: Builder, source: Value, operand: Value, *, select_prim: Any, window_dimensions: Sizes, window_strides: Sizes, padding: Padding
) -> Value:
    return select_and_scatter(b, source, operand, select_prim.name, SlidingWindow.of(window_dimensions, window_strides, padding))


@lowers("select_and_gather_add")
def _select_and_gather_add(
    b: Builder, tangents: Value, operand: Value, *, select_prim: Any, window_dimensions: Sizes, window_strides: Sizes, padding: Padding,
    base_dilation: Sizes, window_dilation: Sizes,
) -> Value:  # fmt: skip
    window = SlidingWindow.of(window_dimensions, window_strides, padding, base_dilation, window_dilation)
    return select_and_gather_add(b, tangents, operand, select_prim.name, window)


@lowers("sort")
def _sort(b: Builder, *operands: Value, dimension: int, num_keys: int) -> tuple[Value, ...]:
    return sorting.sort(b, operands, dimension, num_keys)


@lowers("approx_top_k")
def _approx_top_k(
    b: Builder, x: Value, *, k: int, reduction_dimension: int, is_max_k: bool, aggregate_to_topk: bool,
) -> tuple[Value, Value]:  # fmt: skip
    """Computed exactly."""
    if not aggregate_to_topk:
        raise UnsupportedForm("only aggregate_to_topk=True")
    values, places = sorting.top_k(b, x if is_max_k else b.neg(x), k=k, axis=reduction_dimension)
    return values if is_max_k else b.neg(values), places
