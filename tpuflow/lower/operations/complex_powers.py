"""Roots, logarithms and powers of complex numbers: nothing overflows or underflows on the way to a result that does not."""

from __future__ import annotations

import math

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.operations.complex import Complex, Number, absolute, alike, angle, as_complex, div, mul, of_size_and_angle, square
from tpuflow.lower.operations.elementwise import maximum, minimum

_HUGE, _TINY = 2.0**120, 2.0**-60
"""Outside of these limits sqrt scales its operand by a power of four: a sum of its parts would overflow, or half of one be subnormal."""


def sizes(b: Builder, x: Complex) -> tuple[Value, Value, Value]:
    """(larger, smaller, their ratio) of the parts' absolute values; the ratio is 1 where they are equal, infinities and zeros included."""
    first, second = b.abs(x.real), b.abs(x.imag)
    large, small = maximum(b, first, second), minimum(b, first, second)
    return large, small, b.select(b.eq(large, small), 1, b.div(small, large))


def log_of_size(b: Builder, x: Complex) -> Value:
    """log |x| = log(larger part) + log1p(ratio^2) / 2."""
    large, _, ratio = sizes(b, x)
    return b.add(b.log(large), b.mul(b.log1p(b.mul(ratio, ratio)), 0.5))


def _log_near_one(b: Builder, x: Complex, above: Value) -> Value:
    """log |x| = log1p(above) / 2 near |x| = 1, where above = |x|^2 - 1 was computed without cancellation."""
    near = b.lt(b.abs(above), 0.5)
    return b.select(near, b.mul(b.log1p(b.select(near, above, 0)), 0.5), log_of_size(b, x))


def log(b: Builder, x: Complex) -> Complex:
    """log |x| + i angle(x)."""
    large, small, _ = sizes(b, x)
    above = b.add(b.mul(b.sub(large, 1), b.add(large, 1)), b.mul(small, small))
    return Complex(_log_near_one(b, x, above), angle(b, x))


def log1p(b: Builder, x: Complex) -> Complex:
    """log(1 + x), with |1 + x|^2 - 1 = a (a + 2) + c^2."""
    above = b.add(b.mul(x.real, b.add(x.real, 2)), b.mul(x.imag, x.imag))
    moved = Complex(b.add(x.real, 1), x.imag)
    return Complex(_log_near_one(b, moved, above), angle(b, moved))


def sqrt(b: Builder, x: Complex) -> Complex:
    """The root with a non-negative real part: the part without cancellation first, the other one by division."""
    large = maximum(b, b.abs(x.real), b.abs(x.imag))
    huge, tiny = b.gt(large, _HUGE), b.lt(large, _TINY)
    one = b.full_like(large, 1)
    by, back = (b.select(huge, down, b.select(tiny, up, one)) for down, up in ((2.0**-8, 2.0**60), (2.0**4, 2.0**-30)))
    scaled = Complex(b.mul(x.real, by), b.mul(x.imag, by))
    size = b.sqrt(b.mul(b.add(absolute(b, scaled), b.abs(scaled.real)), 0.5))
    other = b.mul(_over_twice(b, b.abs(scaled.imag), size), back)
    size, right = b.mul(size, back), b.ge(x.real, 0)
    upper = b.select(right, other, size)
    return Complex(b.select(right, size, other), b.select(b.lt(x.imag, 0), b.neg(upper), upper))


def _over_twice(b: Builder, x: Value, size: Value) -> Value:
    """x / (2 size) of non-negative numbers; 0 where size is 0, infinite where both are infinite."""
    found = b.div(x, b.mul(b.select(b.eq(size, 0), 1, size), 2))
    return b.select(b.and_(b.eq(x, math.inf), b.eq(size, math.inf)), math.inf, found)


def rsqrt(b: Builder, x: Complex) -> Complex:
    """1 / sqrt(x)."""
    return div(b, as_complex(b, b.full_like(x.real, 1)), sqrt(b, x))


def atan2(b: Builder, y: Number, x: Number) -> Complex:
    """-i log((x + i y) / sqrt(x^2 + y^2))."""
    y, x = alike(b, y, x)
    one, other = square(b, x), square(b, y)
    size = sqrt(b, Complex(b.add(one.real, other.real), b.add(one.imag, other.imag)))
    found = log(b, div(b, Complex(b.sub(x.real, y.imag), b.add(x.imag, y.real)), size))
    return Complex(found.imag, b.neg(found.real))


def power(b: Builder, x: Number, y: Number) -> Complex:
    """exp(y log x). Of 0 and of a positive infinity there are only the powers with real exponents; anything to the power of 0 is 1."""
    x, y = alike(b, x, y)
    found = of_size_and_angle(b, mul(b, y, log(b, x)))
    flat, up, down = b.eq(y.imag, 0), b.gt(y.real, 0), b.lt(y.real, 0)
    nothing, infinite = (b.and_(b.eq(x.real, end), b.eq(x.imag, 0)) for end in (0, math.inf))
    zero = b.full_like(y.real, 0)
    of_nothing = b.select(b.and_(flat, up), zero, math.nan)
    at_end = b.or_(nothing, b.and_(infinite, b.and_(flat, b.or_(up, down))))
    end = b.select(nothing, of_nothing, b.select(up, math.inf, zero))
    one = b.and_(b.eq(y.real, 0), flat)
    real_part = b.select(at_end, end, found.real)
    imag_part = b.select(nothing, of_nothing, b.select(at_end, 0, found.imag))
    return Complex(b.select(one, 1, real_part), b.select(one, 0, imag_part))
