"""Fourier transforms of any length as products on the matrix unit.

A length of at most LARGEST is one product with the matrix of its roots of unity. Others are taken apart into factors (Cooley and Tukey,
1965), few of them and much alike: a product by f roots takes a row of f for every f elements, so 1024 = 32 x 32 takes the matrix unit 64
rows where 128 x 8 takes 136, and half as many multiplications. Lengths that have a prime factor beyond LARGEST become a convolution of a
length that has none (Bluestein, 1970).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.operations import complex as numbers
from tpuflow.lower.operations.complex import Complex, Number, as_complex, bilinear

LARGEST = 128
"""The sides of the matrix unit of most chips."""


def fft(b: Builder, x: Number, *, kind: str, lengths: Sequence[int]) -> Number:
    """The transform of the last axes, of these lengths; kind: FFT, IFFT, RFFT or IRFFT as XLA has them."""
    rank = len(x.shape)
    axes = list(range(rank - len(lengths), rank))
    if kind == "IRFFT":
        for axis in axes[:-1]:
            x = _along(b, as_complex(b, x), axis, inverse=True)
        return _along(b, _mirrored(b, as_complex(b, x), lengths[-1]), axes[-1], inverse=True).real
    x = as_complex(b, x)
    if kind == "RFFT":
        x = _along(b, x, axes.pop(), inverse=False, count=lengths[-1] // 2 + 1)
    for axis in axes:
        x = _along(b, x, axis, inverse=kind == "IFFT")
    return x


def _first(b: Builder, x: Complex, count: int) -> Complex:
    """The first elements along the last axis."""
    axis = len(x.shape) - 1
    return Complex(*(b.slice_axis(p, axis, 0, count) for p in (x.real, x.imag)))


def _mirrored(b: Builder, x: Complex, n: int) -> Complex:
    """All n elements along the last axis of what has n // 2 + 1 of them: the others are conjugates, the last first."""
    axis = len(x.shape) - 1
    rest = [b.reverse(b.slice_axis(p, axis, 1, (n + 1) // 2), (axis,)) for p in (x.real, x.imag)]
    kept = _first(b, x, n // 2 + 1)
    return Complex(b.concatenate((kept.real, rest[0]), axis), b.concatenate((kept.imag, b.neg(rest[1])), axis))


def _along(b: Builder, x: Complex, axis: int, *, inverse: bool, count: int | None = None) -> Complex:
    """The transform along an axis, all of it or the first elements; the inverse is divided by the length."""
    n = x.shape[axis]
    shape = tuple((n if count is None else count) if i == axis else size for i, size in enumerate(x.shape))
    if not math.prod(x.shape):
        return _each(x, lambda p: b.slice_axis(p, axis, 0, shape[axis]))
    order = [i for i in range(len(shape)) if i != axis] + [axis]
    rows = math.prod(x.shape) // n
    turned = _each(x, lambda p: b.reshape(b.transpose(p, order), (rows, n)))
    found = _transform(b, turned, shape[axis], inverse=inverse)
    if inverse:
        found = _each(found, lambda p: b.mul(p, 1 / n))
    back = [order.index(i) for i in range(len(shape))]
    return _each(found, lambda p: b.transpose(b.reshape(p, [shape[i] for i in order]), back))


def _each(x: Complex, function: Callable[[Value], Value]) -> Complex:
    return Complex(function(x.real), function(x.imag))


def _transform(b: Builder, x: Complex, count: int, *, inverse: bool) -> Complex:
    """The first elements of that of each row of x [R, N], not divided by anything."""
    rows, n = x.shape
    if n <= LARGEST:
        return _product(b, x, _roots(b, np.outer(np.arange(n), np.arange(count)), n, inverse=inverse))
    factors = _factors(n)
    if factors is None:
        return _first(b, _as_convolution(b, x, inverse=inverse), count)
    first = factors[0]
    second = n // first
    parts = _each(x, lambda p: b.reshape(p, (rows, first, second)))
    outer = _product(b, parts, _roots(b, np.outer(np.arange(first), np.arange(first)), first, inverse=inverse))  # [R, N2, N1]
    twiddles = _roots(b, np.outer(np.arange(second), np.arange(first)), n, inverse=inverse)
    turned = numbers.mul(b, outer, _each(twiddles, lambda p: b.broadcast(p, outer.shape, (1, 2))))
    inner = _each(turned, lambda p: b.reshape(b.transpose(p, (0, 2, 1)), (rows * first, second)))
    needed = -(-count // first)  # element k lies at [k // first, k % first]
    done = _transform(b, inner, needed, inverse=inverse)
    return _first(
        b, _each(done, lambda p: b.reshape(b.transpose(b.reshape(p, (rows, first, needed)), (0, 2, 1)), (rows, needed * first))), count
    )


@functools.cache
def _factors(n: int) -> tuple[int, ...] | None:
    """n as a product of as few factors of at most LARGEST as can be, of these those with the least sum of 1 / f; None if it is none."""
    if n <= LARGEST:
        return (n,)
    found = [(f, *rest) for f in range(LARGEST, 1, -1) if n % f == 0 and (rest := _factors(n // f)) is not None]
    return min(found, key=lambda factors: (len(factors), sum(1 / f for f in factors)), default=None)


def _as_convolution(b: Builder, x: Complex, *, inverse: bool) -> Complex:
    """With jk = (j^2 + k^2 - (k - j)^2) / 2 the sum is a convolution with a chirp, done at a power of two that holds it."""
    _, n = x.shape
    m = 1 << (2 * n - 2).bit_length()
    squares = np.arange(n) ** 2 % (2 * n)
    chirp = _roots(b, squares, 2 * n, inverse=inverse)
    moved = _each(numbers.mul(b, x, _spread(b, chirp, x)), lambda p: b.pad(p, 0, (0, 0), (0, m - n)))
    around = np.zeros(m, np.complex128)
    around[:n] = np.exp((-2j if inverse else 2j) * np.pi * squares / (2 * n))
    around[m - n + 1 :] = around[1:n][::-1]
    kernel = np.fft.fft(around) / m
    spectrum = _transform(b, moved, m, inverse=False)
    product = numbers.mul(b, spectrum, _spread(b, _constant(b, kernel), spectrum))
    return numbers.mul(b, _transform(b, product, n, inverse=True), _spread(b, chirp, x))


def _spread(b: Builder, x: Complex, like: Complex) -> Complex:
    """[N] in each row of [R, N]."""
    return _each(x, lambda p: b.broadcast(p, like.shape, (1,)))


def _product(b: Builder, x: Complex, matrix: Complex) -> Complex:
    """Axis 1 of x with the matrix's first: [R, N, ...] -> [R, ..., N]."""
    return bilinear(b, lambda p, q: b.dot(p, q, (1,), (0,), precision="highest"), x, matrix)


def _roots(b: Builder, powers: np.ndarray, n: int, *, inverse: bool) -> Complex:
    """exp(-2 pi i p / n), or with the other sign."""
    return _constant(b, np.exp((2j if inverse else -2j) * np.pi * (powers % n) / n))


def _constant(b: Builder, x: np.ndarray) -> Complex:
    """A constant, rounded to f32."""
    return Complex(*(b.constant(np.array(part, np.float32)) for part in (np.real(x), np.imag(x))))
