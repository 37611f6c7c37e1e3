"""Complex numbers, of which the device has none: a value is two f32 arrays, its real and its imaginary plane.

What moves elements is done with each plane; what computes is written out here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tpuflow.dtypes import F32, DType
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.operations.elementwise import aligned, maximum, minimum
from tpuflow.lower.operations.movement import stack, unstack
from tpuflow.lower.operations.special import cosh, sinh


@dataclass(frozen=True, slots=True)
class ComplexType:
    """The type of an array of complex64."""

    shape: tuple[int, ...]

    @property
    def plane(self) -> TensorType:
        """The type of one plane, f32 of the same shape."""
        return TensorType(F32, self.shape)

    @property
    def planes(self) -> tuple[TensorType, TensorType]:
        """The types of the real and of the imaginary plane."""
        return self.plane, self.plane

    @property
    def port(self) -> TensorType:
        """The type of a complex argument or result of a program: both planes in one array, f32[2, ...]."""
        return TensorType(F32, (2, *self.shape))

    def __str__(self) -> str:
        return f"c64[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Complex:
    """A complex value: its planes."""

    real: Value
    imag: Value

    @property
    def shape(self) -> tuple[int, ...]:
        return self.real.shape

    @property
    def type(self) -> ComplexType:
        return ComplexType(self.shape)


Number = Value | Complex
Type = TensorType | ComplexType


def planes(values: Sequence[Number]) -> list[Value]:
    """The arrays of values: both planes of complex ones, real ones as they are."""
    return [plane for x in values for plane in ((x.real, x.imag) if isinstance(x, Complex) else (x,))]


def plane_types(types: Sequence[Type]) -> list[TensorType]:
    """The types of `planes` of values of these types."""
    return [plane for t in types for plane in (t.planes if isinstance(t, ComplexType) else (t,))]


def listed(types: Sequence[Type]) -> str:
    """Types as text, for messages."""
    return f"({', '.join(map(str, types))})"


def packed(arrays: Sequence[Value], types: Sequence[Any]) -> tuple[Number, ...]:
    """The inverse of `planes`: two arrays make a value of a `ComplexType`, one a value of any other type."""
    left = iter(arrays)
    return tuple(Complex(next(left), next(left)) if isinstance(t, ComplexType) else next(left) for t in types)


def from_port(b: Builder, x: Value) -> Complex:
    """The complex value of an array [2, ...] of its planes."""
    return Complex(*unstack(b, x, axis=0))


def to_port(b: Builder, x: Complex) -> Value:
    """Both planes in one array [2, ...]."""
    return stack(b, x.real, x.imag, axis=0)


def as_complex(b: Builder, x: Number) -> Complex:
    """A real value with an imaginary plane of zeros."""
    if isinstance(x, Complex):
        return x
    wide = b.convert(x, F32)
    return Complex(wide, b.full_like(wide, 0))


def alike(b: Builder, x: Number, y: Number) -> tuple[Complex, Complex]:
    """Both operands as complex numbers, broadcast to one shape."""
    first, second = as_complex(b, x), as_complex(b, y)
    arrays = aligned(b, *planes((first, second)))
    return Complex(*arrays[:2]), Complex(*arrays[2:])


def plane_by_plane(b: Builder, operation: Callable[..., Value | tuple[Value, ...]], operands: Sequence[Number]) -> tuple[Number, ...]:
    """Apply an operation that moves elements to the real planes and to the imaginary ones; real operands (indices, say) go to both."""
    found = [operation(b, *((x.real, x.imag)[i] if isinstance(x, Complex) else x for x in operands)) for i in range(2)]
    real, imag = (x if isinstance(x, tuple) else (x,) for x in found)
    return tuple(Complex(*pair) for pair in zip(real, imag, strict=True))


# --- arithmetic ---------------------------------------------------------------------------------------------------------


def real(b: Builder, x: Complex) -> Value:
    """The real plane."""
    return x.real


def imag(b: Builder, x: Complex) -> Value:
    """The imaginary plane."""
    return x.imag


def make(b: Builder, x: Value, y: Value) -> Complex:
    """x + i y."""
    return Complex(*aligned(b, x, y))


def conj(b: Builder, x: Number) -> Complex:
    """x with its imaginary part negated."""
    x = as_complex(b, x)
    return Complex(x.real, b.neg(x.imag))


def mul(b: Builder, x: Complex, y: Complex) -> Complex:
    """x y, by four products of planes."""
    x, y = alike(b, x, y)
    real_part = b.sub(b.mul(x.real, y.real), b.mul(x.imag, y.imag))
    return Complex(real_part, b.add(b.mul(x.real, y.imag), b.mul(x.imag, y.real)))


def div(b: Builder, x: Complex, y: Complex) -> Complex:
    """Smith's method: the smaller part of y over the larger (R. L. Smith, "Algorithm 116: Complex division", 1962)."""
    x, y = alike(b, x, y)
    flat = b.ge(b.abs(y.real), b.abs(y.imag))
    large, small = b.select(flat, y.real, y.imag), b.select(flat, y.imag, y.real)
    ratio = b.select(b.eq(large, 0), 0, b.div(small, large))
    below = b.add(large, b.mul(small, ratio))
    first, second = b.select(flat, x.real, x.imag), b.select(flat, x.imag, x.real)
    turned = b.sub(second, b.mul(first, ratio))
    return Complex(b.div(b.add(first, b.mul(second, ratio)), below), b.div(b.select(flat, turned, b.neg(turned)), below))


def absolute(b: Builder, x: Complex) -> Value:
    """|x|, without overflow unless the result overflows."""
    a, c = b.abs(x.real), b.abs(x.imag)
    large, small = maximum(b, a, c), minimum(b, a, c)
    ratio = b.select(b.eq(large, 0), 0, b.div(small, large))
    finite = b.mul(large, b.sqrt(b.add(b.mul(ratio, ratio), 1)))
    return b.select(b.eq(large, math.inf), large, finite)


def angle(b: Builder, x: Complex) -> Value:
    """The angle of x, in radians."""
    return b.atan2(x.imag, x.real)


def sign_of(b: Builder, x: Complex) -> Complex:
    """x / |x|; 0 where x is 0."""
    size = absolute(b, x)
    nothing = b.eq(size, 0)
    return Complex(*(b.select(nothing, p, b.div(p, b.select(nothing, 1, size))) for p in (x.real, x.imag)))


def same_bits(b: Builder, x: Complex) -> Complex:
    """x: a bitcast of complex numbers is possible to their own type only."""
    return x


def is_finite(b: Builder, x: Complex) -> Value:
    """Whether both parts are finite."""
    return b.and_(b.is_finite(x.real), b.is_finite(x.imag))


def eq(b: Builder, x: Complex, y: Complex) -> Value:
    """Whether both parts are equal."""
    x, y = alike(b, x, y)
    return b.and_(b.eq(x.real, y.real), b.eq(x.imag, y.imag))


def ne(b: Builder, x: Complex, y: Complex) -> Value:
    """Whether a part differs."""
    x, y = alike(b, x, y)
    return b.or_(b.ne(x.real, y.real), b.ne(x.imag, y.imag))


def exp(b: Builder, x: Complex) -> Complex:
    """exp(a + i c) = e^a (cos c + i sin c). With c = 0 the imaginary part is +0, also where e^a is infinite."""
    found = of_size_and_angle(b, x)
    return Complex(found.real, b.select(b.eq(x.imag, 0), 0, found.imag))


def of_size_and_angle(b: Builder, x: Complex) -> Complex:
    """e^a (cos c + i sin c) for x = a + i c. With c = 0 the imaginary part is c. A part is finite, if it fits, even where e^a overflows."""
    size, half, huge = b.exp(x.real), b.exp(b.mul(x.real, 0.5)), b.gt(x.real, _HUGE_LOGARITHM)

    def times(part: Value) -> Value:
        return b.select(huge, b.mul(b.mul(half, part), half), b.mul(size, part))

    return Complex(times(b.cos(x.imag)), b.select(b.eq(x.imag, 0), x.imag, times(b.sin(x.imag))))


_HUGE_LOGARITHM = 88.0
"""A little below the logarithm of the largest f32."""


def exp2(b: Builder, x: Complex) -> Complex:
    """exp(x log 2)."""
    return exp(b, Complex(*(b.mul(p, math.log(2)) for p in (x.real, x.imag))))


def expm1(b: Builder, x: Complex) -> Complex:
    """exp(x) - 1, whose real part is expm1(a) cos(c) - 2 sin(c / 2)^2."""
    half = b.sin(b.mul(x.imag, 0.5))
    real_part = b.sub(b.mul(b.expm1(x.real), b.cos(x.imag)), b.mul(b.mul(half, half), 2))
    return Complex(real_part, b.mul(b.exp(x.real), b.sin(x.imag)))


def sin(b: Builder, x: Complex) -> Complex:
    """sin a cosh c + i cos a sinh c."""
    return Complex(b.mul(b.sin(x.real), cosh(b, x.imag)), b.mul(b.cos(x.real), sinh(b, x.imag)))


def cos(b: Builder, x: Complex) -> Complex:
    """cos a cosh c - i sin a sinh c."""
    return Complex(b.mul(b.cos(x.real), cosh(b, x.imag)), b.neg(b.mul(b.sin(x.real), sinh(b, x.imag))))


def sinh_of(b: Builder, x: Complex) -> Complex:
    """sinh a cos c + i cosh a sin c."""
    return Complex(b.mul(sinh(b, x.real), b.cos(x.imag)), b.mul(cosh(b, x.real), b.sin(x.imag)))


def cosh_of(b: Builder, x: Complex) -> Complex:
    """cosh a cos c + i sinh a sin c."""
    return Complex(b.mul(cosh(b, x.real), b.cos(x.imag)), b.mul(sinh(b, x.real), b.sin(x.imag)))


def tanh(b: Builder, x: Complex) -> Complex:
    """(t (1 + u^2) + i u (1 - t^2)) / (1 + t^2 u^2), with t = tanh(a), u = tan(c): no part overflows where the result does not."""
    t, u = b.tanh(x.real), b.div(b.sin(x.imag), b.cos(x.imag))
    square = b.mul(u, u)
    below = b.add(b.mul(b.mul(t, t), square), 1)
    return Complex(
        b.div(b.mul(t, b.add(square, 1)), below), b.div(b.mul(u, b.mul(b.sub(1, t), b.add(t, 1))), below)
    )  # fmt: skip


def turned(function: Callable[[Builder, Complex], Complex]) -> Callable[[Builder, Complex], Complex]:
    """-i f(i x): asinh of asin, atan of atanh, tan of tanh."""

    def rule(b: Builder, x: Complex) -> Complex:
        found = function(b, Complex(b.neg(x.imag), x.real))
        return Complex(found.imag, b.neg(found.real))

    return rule


tan = turned(tanh)


def logistic(b: Builder, x: Complex) -> Complex:
    """1 / (1 + exp(-x)) or exp(x) / (1 + exp(x)), whichever exponential does not overflow."""
    left = b.lt(x.real, 0)
    small = exp(b, Complex(*(b.select(left, p, b.neg(p)) for p in (x.real, x.imag))))
    above = Complex(b.select(left, small.real, 1), b.select(left, small.imag, 0))
    return div(b, above, Complex(b.add(small.real, 1), small.imag))


def square(b: Builder, x: Complex) -> Complex:
    """x x, its real part as (a - c)(a + c)."""
    return Complex(b.mul(b.sub(x.real, x.imag), b.add(x.real, x.imag)), b.mul(b.mul(x.real, x.imag), 2))


def integer_pow(b: Builder, x: Complex, *, y: int) -> Complex:
    """x^y by repeated squaring."""
    one = as_complex(b, b.full_like(x.real, 1))
    factors, left = [], abs(y)
    while left:
        factors += [x] if left % 2 else []
        left //= 2
        x = mul(b, x, x) if left else x
    result = functools.reduce(lambda p, q: mul(b, p, q), factors) if factors else one
    return result if y >= 0 else div(b, one, result)


# --- sums of products -----------------------------------------------------------------------------------------------------


def bilinear(b: Builder, product: Callable[[Value, Value], Value], x: Number, y: Number) -> Complex:
    """A bilinear product (dot, convolution) of complex arrays by four products of planes; those with a plane of zeros are left out."""

    def times(p: Value, q: Value) -> Value | None:
        return None if 0 in (b.known(p), b.known(q)) else product(p, q)

    x, y = as_complex(b, x), as_complex(b, y)
    found = [times(p, q) for p, q in ((x.real, y.real), (x.imag, y.imag), (x.real, y.imag), (x.imag, y.real))]
    given = next((f for f in found if f is not None), None)
    zeros = b.full_like(product(x.real, y.real) if given is None else given, 0)
    first, second, third, fourth = (zeros if f is None else f for f in found)
    return Complex(b.sub(first, second), b.add(third, fourth))


def convert(b: Builder, x: Number, dtype: DType | None) -> Number:
    """Convert to an element type of the device (the real plane), or, with dtype None, to complex numbers."""
    if dtype is None:
        return as_complex(b, x)
    if not isinstance(x, Complex):
        return b.convert(x, dtype)
    if dtype.kind == "pred":
        return b.or_(b.ne(x.real, 0), b.ne(x.imag, 0))
    return b.convert(x.real, dtype)
