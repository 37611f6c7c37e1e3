"""Rules of complex numbers, and of Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from tpuflow.dtypes import F32
from tpuflow.jaxprs.batches import FFT
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.importers.stablehlo.rules import products  # noqa: F401  (whose rules are used here)
from tpuflow.lower.importers.stablehlo.rules.indexing import slices
from tpuflow.lower.importers.stablehlo.rules.reductions import keys_of, window_of
from tpuflow.lower.importers.stablehlo.walk import COMPLEX, PLANEWISE, RULES, STORED, STRUCTURAL, Region
from tpuflow.lower.operations import complex as numbers
from tpuflow.lower.operations import complex_inverses as inverses
from tpuflow.lower.operations import complex_powers as powers
from tpuflow.lower.operations import complex_reductions as reduced
from tpuflow.lower.operations import movement, sorting, windows
from tpuflow.lower.operations.complex import Complex, ComplexType, Number, Type, bilinear, packed, plane_by_plane, planes
from tpuflow.lower.operations.fft import fft
from tpuflow.lower.operations.forms import UnsupportedForm
from tpuflow.lower.operations.scatter_by import scatter_by
from tpuflow.lower.operations.window import Sizes

STRUCTURAL.update((
    "func.call", "stablehlo.composite", "stablehlo.case", "stablehlo.if", "stablehlo.while", "stablehlo.optimization_barrier",
    "sdy.manual_computation", "sdy.named_computation", "sdy.sharding_constraint", "sdy.reshard", "sdy.propagation_barrier",
    "sdy.sharding_group", "mhlo.copy",
))  # fmt: skip
STORED.update(f"stablehlo.{operation}" for operation in (
    "all_gather", "all_to_all", "bitcast_convert", "broadcast_in_dim", "collective_permute", "concatenate", "constant", "convert",
    "convolution", "dot", "dot_general", "dynamic_slice", "dynamic_update_slice", "gather", "iota", "pad", "reshape", "reverse", "select",
    "slice", "sort", "transpose",
))  # fmt: skip
STORED.add("chlo.next_after")
PLANEWISE.update(f"stablehlo.{operation}" for operation in (
    "add", "broadcast_in_dim", "concatenate", "dynamic_slice", "dynamic_update_slice", "gather", "negate", "pad", "reduce_precision",
    "reshape", "reverse", "select", "slice", "subtract", "transpose",
))  # fmt: skip
COMPLEX.enter({
    "stablehlo.real": numbers.real, "stablehlo.imag": numbers.imag, "stablehlo.complex": numbers.make, "stablehlo.multiply": numbers.mul,
    "stablehlo.divide": numbers.div, "stablehlo.abs": numbers.absolute, "stablehlo.sign": numbers.sign_of,
    "stablehlo.is_finite": numbers.is_finite, "stablehlo.exponential": numbers.exp, "stablehlo.log": powers.log,
    "stablehlo.log_plus_one": powers.log1p, "stablehlo.exponential_minus_one": numbers.expm1, "stablehlo.sine": numbers.sin,
    "stablehlo.cosine": numbers.cos, "stablehlo.tan": numbers.tan, "chlo.tan": numbers.tan, "chlo.sinh": numbers.sinh_of,
    "chlo.cosh": numbers.cosh_of, "stablehlo.tanh": numbers.tanh, "stablehlo.logistic": numbers.logistic, "stablehlo.sqrt": powers.sqrt,
    "stablehlo.rsqrt": powers.rsqrt, "chlo.square": numbers.square, "chlo.conj": numbers.conj, "stablehlo.power": powers.power,
    "chlo.asin": inverses.asin, "chlo.acos": inverses.acos, "chlo.atan": inverses.atan, "chlo.asinh": inverses.asinh,
    "chlo.acosh": inverses.acosh, "chlo.atanh": inverses.atanh, "stablehlo.maximum": partial(reduced.extreme, op="max"),
    "stablehlo.minimum": partial(reduced.extreme, op="min"), "stablehlo.bitcast_convert": numbers.same_bits,
    "stablehlo.clamp": reduced.clamp, "stablehlo.atan2": powers.atan2,
})  # fmt: skip


@COMPLEX.lowers("stablehlo.compare")
def _compare(b: Builder, x: Complex, y: Complex, *, comparison_direction: str) -> Value:
    compare = {"EQ": numbers.eq, "NE": numbers.ne}.get(comparison_direction)
    if compare is None:
        raise UnsupportedForm(f"complex numbers compared by {comparison_direction}; they are equal (EQ) or not (NE)")
    return compare(b, x, y)


@COMPLEX.lowers("stablehlo.convert")
def _convert(b: Builder, x: Number, *, types: tuple[Type]) -> Number:
    return numbers.convert(b, x, types[0].dtype if isinstance(types[0], TensorType) else None)


@COMPLEX.lowers("stablehlo.constant")
def _constant(b: Builder, *, value: Any) -> Complex:
    if not isinstance(value, np.ndarray):
        raise UnsupportedForm(f"its value is not given as numbers ({value})")
    return Complex(*(b.constant(np.array(part, np.float32)) for part in (value.real, value.imag)))


@COMPLEX.lowers("stablehlo.iota")
def _iota(b: Builder, *, iota_dimension: int, types: tuple[ComplexType]) -> Complex:
    return numbers.as_complex(b, movement.iota(b, F32, types[0].shape, iota_dimension))


@COMPLEX.lowers("stablehlo.fft")
def _fft(b: Builder, x: Number, *, fft_type: str, fft_length: Sequence[int]) -> Number:
    return fft(b, x, kind=fft_type, lengths=fft_length)


@COMPLEX.lowers(f"custom_call {FFT}")
def _called_fft(b: Builder, x: Number, *, backend_config: str) -> Number:
    kind, *lengths = backend_config.split()
    return fft(b, x, kind=kind, lengths=[int(n) for n in lengths])


@COMPLEX.lowers("stablehlo.sort")
def _sort(b: Builder, *operands: Number, dimension: int, regions: tuple[Region]) -> tuple[Number, ...]:
    """Sort by one key or several with JAX's comparator: complex keys by the real part, then by the imaginary part."""
    keys = keys_of(operands, regions[0])
    if not keys:
        raise UnsupportedForm("complex numbers in another order than that of jnp.sort and lax.sort")
    arrays = sorting.sort(b, planes(operands), dimension % len(operands[0].shape), len(planes(operands[:keys])))
    return packed(arrays, [x.type for x in operands])


@COMPLEX.lowers("stablehlo.reduce")
def _reduce(b: Builder, *operands: Number, dimensions: Sizes, regions: tuple[Region]) -> tuple[Number, ...]:
    """Sums with each plane, anything else with both at once."""
    if regions[0].expressions() == ("add(a, b)",):
        return _same(b, "stablehlo.reduce", operands, {"dimensions": dimensions, "regions": regions})
    count = len(operands) // 2
    return reduced.reduce_by(b, regions[0].elementwise, operands[:count], operands[count:], dimensions)


@COMPLEX.lowers("stablehlo.reduce_window")
def _reduce_window(
    b: Builder, *operands: Number, regions: tuple[Region], window_dimensions: Sizes, window_strides: Sizes = (), padding: Any = None,
    base_dilations: Sizes = (), window_dilations: Sizes = (),
) -> tuple[Number, ...]:  # fmt: skip
    """Sums with each plane, running products in doubling steps, anything else element by element."""
    count, texts = len(operands) // 2, regions[0].expressions()
    x, known = operands[0], tuple(map(b.known, planes(operands[count:])))
    window = window_of(window_dimensions, window_strides, padding, base_dilations, window_dilations)
    if texts == ("add(a, b)",):
        added = operands[:count] if known == (0, 0) else operands
        return plane_by_plane(b, lambda b, p, *start: windows.reduce_window(b, "add", p, window, *start), added)
    scan = windows.as_cumulative(x.shape, window)
    if texts == ("multiply(a, b)",) and scan is not None and known == (1, 0):
        assert isinstance(x, Complex)
        return (reduced.cumprod(b, x, axis=scan[0], reverse=scan[1]),)
    return reduced.reduce_window_by(b, regions[0].elementwise, operands[:count], operands[count:], window)


@COMPLEX.lowers("stablehlo.scatter")
def _scatter(
    b: Builder, *operands: Number, scatter_dimension_numbers: Any, regions: tuple[Region], unique_indices: bool = False
) -> tuple[Number, ...]:
    """Set, add and subtract act plane by plane; any other update on both planes at once."""
    count, kinds = len(operands) // 2, regions[0].block.types
    if regions[0].expressions() in (("b",), ("add(a, b)",), ("subtract(a, b)",)):
        return _same(b, "stablehlo.scatter", operands, {"scatter_dimension_numbers": scatter_dimension_numbers, "regions": regions})

    def body(b: Builder, *arrays: Value) -> list[Value]:
        return planes(regions[0].elementwise(b, *packed(arrays, kinds)))

    indices = operands[count]
    assert isinstance(indices, Value)
    places, axes = slices(b, indices, scatter_dimension_numbers)
    arrays, updates = planes(operands[:count]), planes(operands[count + 1 :])
    return packed(scatter_by(b, body, arrays, places, updates, axes, apart=unique_indices), kinds[:count])


def _same(b: Builder, name: str, operands: Sequence[Number], params: dict[str, Any]) -> tuple[Number, ...]:
    """Apply the rule for real numbers to both planes."""
    return plane_by_plane(b, lambda b, *arrays: RULES[name](b, *arrays, params=params), operands)


def _product(name: str) -> Callable[..., Complex]:
    """The rule of an operation that is linear in both operands: four times that of real numbers."""

    def rule(b: Builder, x: Number, y: Number, *, types: tuple[ComplexType], **params: Any) -> Complex:
        def once(p: Value, q: Value) -> Value:
            (result,) = RULES[name](b, p, q, params={**params, "types": types[0].planes[:1]})
            return result

        return bilinear(b, once, x, y)

    return rule


for _name in ("stablehlo.dot_general", "stablehlo.dot", "stablehlo.convolution"):
    COMPLEX.enter({_name: _product(_name)}, **{parameter: parameter for parameter, _ in RULES[_name].params})
