"""Special functions that no unit has: compositions of exp, log, sqrt, atan2 and polynomials, computed in f32."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.operations.elementwise import aligned, in_f32, with_sign


def polynomial(b: Builder, x: Value, coefficients: Sequence[float]) -> Value:
    """Horner's scheme, highest power first."""
    first, *rest = coefficients
    return functools.reduce(lambda acc, c: b.add(b.mul(acc, x), c), rest, b.full_like(x, first))


@in_f32
def exp2(b: Builder, x: Value) -> Value:
    """2 to the power of x."""
    return b.pow(2, x)


@in_f32
def tan(b: Builder, x: Value) -> Value:
    """sin(x) / cos(x)."""
    return b.div(b.sin(x), b.cos(x))


@in_f32
def sinh(b: Builder, x: Value) -> Value:
    """By expm1 for |x| < 1 (no cancellation), else by halves of exp(|x| / 2) squared (no early overflow)."""
    size = b.abs(x)
    e = b.expm1(x)
    small = b.mul(b.add(e, b.div(e, b.add(e, 1))), 0.5)
    half = b.exp(b.mul(size, 0.5))
    large = b.sub(b.mul(b.mul(half, 0.5), half), b.div(b.div(0.5, half), half))
    return b.select(b.lt(size, 1), small, with_sign(b, large, x))


@in_f32
def cosh(b: Builder, x: Value) -> Value:
    """By halves of exp(|x| / 2) squared (no early overflow)."""
    half = b.exp(b.mul(b.abs(x), 0.5))
    return b.add(b.mul(b.mul(half, 0.5), half), b.div(b.div(0.5, half), half))


@in_f32
def asin(b: Builder, x: Value) -> Value:
    """The angle whose sine is x."""
    return b.atan2(x, _sqrt_one_minus_square(b, x))


@in_f32
def acos(b: Builder, x: Value) -> Value:
    """The angle whose cosine is x."""
    return b.atan2(_sqrt_one_minus_square(b, x), x)


def _sqrt_one_minus_square(b: Builder, x: Value) -> Value:
    return b.sqrt(b.mul(b.sub(1, x), b.add(1, x)))


@in_f32
def atan(b: Builder, x: Value) -> Value:
    """The angle whose tangent is x."""
    return b.atan2(x, b.full_like(x, 1))


@in_f32
def asinh(b: Builder, x: Value) -> Value:
    """log(|x| + sqrt(x^2 + 1)) by log1p, so that small x keeps its digits; log(2 |x|) where x^2 would overflow."""
    size = b.abs(x)
    square = b.mul(x, x)
    small = b.log1p(b.add(size, b.div(square, b.add(1, b.sqrt(b.add(square, 1))))))
    large = b.add(b.log(size), math.log(2))
    result = with_sign(b, b.select(b.gt(size, 1e18), large, small), x)
    return b.select(b.eq(x, 0), x, result)


@in_f32
def acosh(b: Builder, x: Value) -> Value:
    """With t = x - 1, log1p(t + sqrt(2 t + t^2)); log(2 x) where t^2 would overflow."""
    t = b.sub(x, 1)
    near = b.log1p(b.add(t, b.sqrt(b.add(b.mul(t, 2), b.mul(t, t)))))
    return b.select(b.gt(x, 1e18), b.add(b.log(x), math.log(2)), near)


@in_f32
def atanh(b: Builder, x: Value) -> Value:
    """(log1p(x) - log1p(-x)) / 2."""
    return b.mul(b.sub(b.log1p(x), b.log1p(b.neg(x))), 0.5)


# Cephes, ndtrf.c: erfc(x) = exp(-x^2) / x * P(1 / x^2) for 1 < x < 2, R beyond.
_ERFC_P = (
    2.326819970068386e-2, -1.387039388740657e-1, 3.687424674597105e-1, -5.824733027278666e-1, 6.210004621745983e-1,
    -4.944515323274145e-1, 3.404879937665872e-1, -2.741127028184656e-1, 5.638259427386472e-1,
)  # fmt: skip
_ERFC_R = (
    -1.047766399936249e1, 1.297719955372516e1, -7.495518717768503e0, 2.921019019210786e0, -1.015265279202700e0,
    4.218463358204948e-1, -2.820767439740514e-1, 5.641895067754075e-1,
)  # fmt: skip


@in_f32
def erfc(b: Builder, x: Value) -> Value:
    """1 - erf(x), without cancellation beyond 1."""
    size = b.abs(x)
    inverse = b.reciprocal(b.max(size, 1))
    y = b.mul(inverse, inverse)
    shape = b.select(b.gt(y, 0.25), polynomial(b, y, _ERFC_P), polynomial(b, y, _ERFC_R))
    tail = b.mul(b.mul(b.exp(b.neg(b.mul(x, x))), inverse), shape)
    tail = b.select(b.lt(x, 0), b.sub(2, tail), tail)
    return b.select(b.gt(size, 1), tail, b.sub(1, b.erf(x)))


# M. Giles, "Approximating the erfinv function", GPU Computing Gems 4 (2011): single precision.
_ERF_INV_CENTRE = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
_ERF_INV_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip


@in_f32
def erf_inv(b: Builder, x: Value) -> Value:
    """The number whose erf is x."""
    w = b.neg(b.log1p(b.neg(b.mul(x, x))))
    central = b.lt(w, 5)
    t = b.select(central, b.sub(w, 2.5), b.sub(b.sqrt(w), 3))
    result = b.mul(b.select(central, polynomial(b, t, _ERF_INV_CENTRE), polynomial(b, t, _ERF_INV_TAIL)), x)
    return b.select(b.eq(b.abs(x), 1), b.mul(x, math.inf), result)


# Lanczos approximation, g = 7, nine terms (P. Godfrey's coefficients), as XLA uses it.
_LANCZOS_G = 7.0
_LANCZOS_BASE = 0.99999999999980993227684700473478
_LANCZOS = (
    676.520368121885098567009190444019, -1259.13921672240287047156078755283, 771.3234287776530788486528258894,
    -176.61502916214059906584551354, 12.507343278686904814458936853, -0.13857109526572011689554707,
    9.984369578019570859563e-6, 1.50563273514931155834e-7,
)  # fmt: skip


def _log_lanczos_shift(b: Builder, z: Value) -> tuple[Value, Value]:
    """t = z + g + 1/2 and its logarithm."""
    half_up = _LANCZOS_G + 0.5
    return b.add(z, half_up), b.add(b.log1p(b.div(z, half_up)), math.log(half_up))


@in_f32
def lgamma(b: Builder, x: Value) -> Value:
    """log |gamma(x)|; below 1/2 by reflection, gamma(x) gamma(1 - x) = pi / sin(pi x)."""
    reflected = b.lt(x, 0.5)
    z = b.select(reflected, b.neg(x), b.sub(x, 1))
    series = b.full_like(x, _LANCZOS_BASE)
    for i, c in enumerate(_LANCZOS):
        series = b.add(series, b.div(c, b.add(z, i + 1)))
    t, log_t = _log_lanczos_shift(b, z)
    inner = b.mul(b.sub(b.add(z, 0.5), b.div(t, log_t)), log_t)
    direct = b.add(b.add(inner, 0.5 * math.log(2 * math.pi)), b.log(series))
    size = b.abs(x)
    fraction = b.sub(size, b.floor(size))
    fraction = b.select(b.gt(fraction, 0.5), b.sub(1, fraction), fraction)
    log_sine = b.log(b.sin(b.mul(fraction, math.pi)))
    mirrored = b.select(b.is_finite(log_sine), b.sub(b.sub(math.log(math.pi), log_sine), direct), b.neg(log_sine))
    return b.select(b.eq(size, math.inf), size, b.select(reflected, mirrored, direct))


@in_f32
def digamma(b: Builder, x: Value) -> Value:
    """Derivative of lgamma by the same series; poles at 0, -1, -2, ... give NaN."""
    reflected = b.lt(x, 0.5)
    z = b.select(reflected, b.neg(x), b.sub(x, 1))
    slope, series = b.full_like(x, 0), b.full_like(x, _LANCZOS_BASE)
    for i, c in enumerate(_LANCZOS):
        at = b.add(z, i + 1)
        slope = b.sub(slope, b.div(c, b.mul(at, at)))
        series = b.add(series, b.div(c, at))
    t, log_t = _log_lanczos_shift(b, z)
    direct = b.sub(b.add(log_t, b.div(slope, series)), b.div(_LANCZOS_G, t))
    angle = b.mul(b.add(x, b.abs(b.floor(b.add(x, 0.5)))), math.pi)
    mirrored = b.sub(direct, b.div(b.mul(b.cos(angle), math.pi), b.sin(angle)))
    pole = b.and_(b.le(x, 0), b.eq(x, b.floor(x)))
    return b.select(pole, b.full_like(x, math.nan), b.select(reflected, mirrored, direct))


_ZETA_TERMS = 10
# B(2 j) / (2 j)! of the Euler-Maclaurin formula, j = 1, 2, ... (Abramowitz and Stegun 23.1, 23.2).
_ZETA = (1 / 12, -1 / 720, 1 / 30240, -1 / 1209600, 1 / 47900160, -691 / 1307674368000)


@in_f32
def zeta(b: Builder, x: Value, q: Value) -> Value:
    """Sum of (q + k)^-x, k = 0, 1, ...: ten terms and the Euler-Maclaurin tail."""
    return _hurwitz(b, *aligned(b, x, q))


def _hurwitz(b: Builder, x: Value, q: Value) -> Value:
    """The Hurwitz zeta function for x > 1; infinite at x = 1 and at the poles q = 0, -1, ...; NaN for x < 1."""
    negative = b.neg(x)
    powers = [b.pow(b.add(q, k) if k else q, negative) for k in range(_ZETA_TERMS)]
    a = b.add(q, _ZETA_TERMS)
    last = b.pow(a, negative)
    tail = b.add(b.div(b.mul(last, a), b.sub(x, 1)), b.mul(last, 0.5))
    factor = b.div(b.mul(last, x), a)
    for j, c in enumerate(_ZETA):
        tail = b.add(tail, b.mul(factor, c))
        grown = b.mul(b.add(x, 2 * j + 1), b.add(x, 2 * j + 2))
        factor = b.mul(factor, b.div(grown, b.mul(a, a)))
    result = b.add(functools.reduce(b.add, powers), tail)
    pole = b.or_(b.eq(x, 1), b.and_(b.le(q, 0), b.eq(q, b.floor(q))))
    return b.select(b.lt(x, 1), b.full_like(x, math.nan), b.select(pole, b.full_like(x, math.inf), result))


@in_f32
def polygamma(b: Builder, n: Value, x: Value) -> Value:
    """(-1)^(n + 1) n! zeta(n + 1, x); digamma for n = 0."""
    n, x = aligned(b, n, x)
    order = b.add(n, 1)
    size = b.mul(b.exp(lgamma(b, order)), _hurwitz(b, order, x))
    odd = b.ne(b.rem(n, 2), 0)
    return b.select(b.eq(n, 0), digamma(b, x), b.select(odd, size, b.neg(size)))


@in_f32
def bessel_i1e(b: Builder, x: Value) -> Value:
    """exp(-|x|) I1(x): Chebyshev series in |x| / 2 - 2 up to 8, in 32 / |x| - 2 beyond (Cephes, i1f.c)."""
    (size,) = aligned(b, b.abs(x))
    near = b.mul(chebyshev(b, b.sub(b.mul(size, 0.5), 2), _I1E_NEAR), size)
    beyond = b.max(size, 8)
    far = b.div(chebyshev(b, b.sub(b.div(32, beyond), 2), _I1E_FAR), b.sqrt(beyond))
    return with_sign(b, b.select(b.le(size, 8), near, far), x)


_I1E_NEAR = (
    9.38153738649577178388e-9, -4.44505912879632808065e-8, 2.00329475355213526229e-7, -8.56872026469545474066e-7,
    3.47025130813767847674e-6, -1.32731636560394358279e-5, 4.78156510755005422638e-5, -1.61760815825896745588e-4,
    5.12285956168575772895e-4, -1.51357245063125314899e-3, 4.15642294431288815669e-3, -1.05640848946261981558e-2,
    2.47264490306265168283e-2, -5.29459812080949914269e-2, 1.02643658689847095384e-1, -1.76416518357834055153e-1,
    2.52587186443633654823e-1,
)  # fmt: skip
_I1E_FAR = (
    -3.83538038596423702205e-9, -2.63146884688951950684e-8, -2.51223623787020892529e-7, -3.88256480887769039346e-6,
    -1.10588938762623716291e-4, -9.76109749136146840777e-3, 7.78576235018280120474e-1,
)  # fmt: skip


def chebyshev(b: Builder, x: Value, coefficients: Sequence[float]) -> Value:
    """Clenshaw's recurrence, highest term first, the constant one halved."""
    older = newer = b.full_like(x, 0)
    oldest = older
    for c in coefficients:
        oldest, older, newer = older, newer, b.add(b.sub(b.mul(x, newer), older), c)
    return b.mul(b.sub(newer, oldest), 0.5)
