"""Inverse circular and hyperbolic functions of complex numbers.

Arcsine and arccosine by T. E. Hull, T. F. Fairgrieve, P. T. P. Tang, "Implementing the complex arcsine and arccosine functions using
exception handling" (1997): no cancellation near the branch points, no overflow far out. At the branch cuts a zero of either sign counts
as positive, as in JAX.
"""

from __future__ import annotations

import math

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.operations.complex import Complex, absolute, turned
from tpuflow.lower.operations.complex_powers import log_of_size
from tpuflow.lower.operations.elementwise import maximum, with_sign

_FAR = 2.0**61
"""From here on 1 is nothing beside a part, the square of which does not overflow yet."""
_NEAR = 2.0**-61
"""Imaginary parts below it have squares without digits."""
_TALL, _TALLER, _WIDE = 2.0**41, 2.0**68, 2.0**101
"""Imaginary parts from the first on (the second, if the real part is as large as the third) are most of a number, or their ratio to the
real part has a square that does not overflow."""
_POLE = 2.0**-30
"""So near its pole atanh is log(2 / distance) / 2: the squares of the distance's parts may be subnormal."""
_POLE_FAR = 2.0**48
"""From here on atanh is 1 / x but for the angle: x^2 is that much more than 1."""


def asin(b: Builder, x: Complex) -> Complex:
    """The angle x / adjacent, and the logarithm of the larger half axis of the confocal ellipse through x."""
    adjacent, height = _sides(b, x)
    return Complex(b.atan2(x.real, adjacent), with_sign(b, height, x.imag))


def acos(b: Builder, x: Complex) -> Complex:
    """pi / 2 - asin(x)."""
    adjacent, height = _sides(b, x)
    return Complex(b.atan2(adjacent, x.real), b.neg(with_sign(b, height, x.imag)))


def acosh(b: Builder, x: Complex) -> Complex:
    """i acos(x) or -i acos(x), that of positive real part."""
    adjacent, height = _sides(b, x)
    return Complex(height, with_sign(b, b.atan2(adjacent, x.real), x.imag))


def _sides(b: Builder, x: Complex) -> tuple[Value, Value]:
    """sqrt(1 - b^2) where asin(x) has the sine b for a real part, times x / b; and the size of asin's imaginary part."""
    x = Complex(b.abs(x.real), b.abs(x.imag))
    more, beyond = b.add(x.real, 1), b.sub(x.real, 1)
    r, s = (absolute(b, Complex(p, x.imag)) for p in (more, beyond))  # to the foci
    half_axis = b.mul(b.add(r, s), 0.5)
    square = b.mul(x.imag, x.imag)
    r_more, outside = b.add(r, more), b.ge(x.real, 1)
    s_more = b.select(outside, b.add(s, beyond), b.sub(s, beyond))
    adjacent = _adjacent(b, x, b.mul(b.add(half_axis, x.real), 0.5), r_more, s_more)
    excess = b.add(b.div(square, r_more), b.select(outside, s_more, b.div(square, s_more)))  # twice half_axis - 1
    found = b.log1p(b.add(b.mul(excess, 0.5), b.sqrt(b.mul(excess, b.mul(b.add(half_axis, 1), 0.5)))))
    low = b.and_(b.lt(x.real, 1), b.lt(x.imag, _NEAR))
    flat = b.div(x.imag, b.sqrt(b.neg(b.mul(more, b.select(low, beyond, -1)))))
    return adjacent, _far_height(b, x, b.select(low, flat, found))


def _adjacent(b: Builder, x: Complex, mean: Value, r_more: Value, s_more: Value) -> Value:
    """sqrt(mean (c^2 / (r + a + 1) + s + 1 - a)) on the left of the focus 1, on its right c sqrt(mean / (r + a + 1) + mean / (s + a - 1)),
    far out c: of x = a + i c."""
    left = b.sqrt(b.mul(mean, b.add(b.div(b.mul(x.imag, x.imag), r_more), s_more)))
    right = b.mul(x.imag, b.sqrt(b.add(b.div(mean, r_more), b.div(mean, s_more))))
    near = b.select(b.le(x.real, 1), left, right)
    return b.select(b.ge(maximum(b, x.real, x.imag), _FAR), x.imag, near)


def _far_height(b: Builder, x: Complex, near: Value) -> Value:
    """log(2 |x|) far out: of the imaginary part, where that is large, and of the ratio to it; else of the real part alone."""
    tall = b.ge(x.imag, b.select(b.lt(x.real, _WIDE), b.full_like(x.real, _TALL), _TALLER))
    large = b.select(tall, x.imag, x.real)
    ratio = b.select(b.and_(tall, b.ne(x.imag, math.inf)), b.div(x.real, x.imag), 0)
    far = b.add(b.add(b.log(large), math.log(2)), b.mul(b.log1p(b.mul(ratio, ratio)), 0.5))
    return b.select(b.or_(tall, b.ge(large, _FAR)), far, near)


def atanh(b: Builder, x: Complex) -> Complex:
    """log1p(4 a / ((1 - a)^2 + c^2)) / 4 + i atan(2 c / ((1 - a)(1 + a) - c^2)) / 2, for a >= 0; the function is odd. So near the pole 1
    that the squares may have no digits, the real part is log(2 / |1 - x|) / 2."""
    a, c = b.abs(x.real), x.imag
    square, less = b.mul(c, c), b.sub(1, a)
    bounded = b.and_(b.lt(a, _POLE_FAR), b.lt(b.abs(c), _POLE_FAR))
    ratio = b.select(bounded, b.div(a, b.add(b.mul(less, less), square)), _over_square(b, a, b.abs(c)))
    angle = b.atan2(b.mul(c, 2), b.sub(b.mul(less, b.add(a, 1)), square))
    half_turn = b.select(b.ge(c, 0), math.pi, b.full_like(c, -math.pi))
    at_pole = b.lt(maximum(b, b.abs(less), b.abs(c)), _POLE)
    close = b.mul(b.sub(math.log(2), log_of_size(b, Complex(less, c))), 0.5)
    size = b.select(at_pole, close, b.mul(b.log1p(b.mul(ratio, 4)), 0.25))
    return Complex(b.select(b.ge(x.real, 0), size, b.neg(size)), b.mul(b.select(bounded, angle, half_turn), 0.5))


def _over_square(b: Builder, a: Value, c: Value) -> Value:
    """a / (a^2 + c^2) where the squares may overflow; 0 of infinities."""
    large = maximum(b, a, c)
    ratio = b.div(b.select(b.ge(a, c), c, a), large)
    found = b.div(b.div(a, large), b.mul(large, b.add(b.mul(ratio, ratio), 1)))
    return b.select(b.or_(b.eq(a, math.inf), b.eq(c, math.inf)), 0, found)


asinh, atan = turned(asin), turned(atanh)
