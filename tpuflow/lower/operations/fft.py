"""Fourier transforms of any length as products on the matrix unit.

A length of at most LARGEST is one product with the matrix of its roots of unity. Others are factored (Cooley and Tukey, 1965) into few and
similar factors: a product by f roots takes a row of f for every f elements, so 1024 = 32 x 32 takes the matrix unit 64
rows where 128 x 8 takes 136, and half as many multiplications. Lengths that have a prime factor beyond LARGEST become a convolution of a
length that has none (Bluestein, 1970).

Between two products the real and imaginary planes are stacked along an axis, over which the second product contracts as well, and whose
result has both planes again.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.operations import complex as numbers
from tpuflow.lower.operations.complex import Complex, Number, as_complex

LARGEST = 128
"""The side of most chips' matrix arrays."""


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
    """All n elements of a Hermitian spectrum from its first n // 2 + 1: the others are their conjugates, in reverse order."""
    axis = len(x.shape) - 1
    rest = [b.reverse(b.slice_axis(p, axis, 1, (n + 1) // 2), (axis,)) for p in (x.real, x.imag)]
    kept = _first(b, x, n // 2 + 1)
    return Complex(b.concatenate((kept.real, rest[0]), axis), b.concatenate((kept.imag, b.neg(rest[1])), axis))


def _along(b: Builder, x: Complex, axis: int, *, inverse: bool, count: int | None = None) -> Complex:
    """The transform along an axis, or its first `count` elements; the inverse is divided by the length."""
    n = x.shape[axis]
    shape = tuple((n if count is None else count) if i == axis else size for i, size in enumerate(x.shape))
    if not math.prod(x.shape):
        return _each(x, lambda p: b.slice_axis(p, axis, 0, shape[axis]))
    order = [i for i in range(len(shape)) if i != axis] + [axis]
    rows = math.prod(x.shape) // n
    turned = _each(x, lambda p: b.reshape(b.transpose(p, order), (rows, n)))
    found = _transform(b, _stacks(b, turned), shape[axis], inverse=inverse)
    if inverse:
        found = _each(found, lambda p: b.mul(p, 1 / n))
    back = [order.index(i) for i in range(len(shape))]
    return _each(found, lambda p: b.transpose(b.reshape(p, [shape[i] for i in order]), back))


def _stacks(b: Builder, x: Complex) -> list[Value]:
    """The planes of [R, N] as stacks of one, [1, R, N], without one of zeros."""
    planes = [x.real] if b.known(x.imag) == 0 else [x.real, x.imag]
    return [b.reshape(p, (1, *p.shape)) for p in planes]


def _apart(b: Builder, x: Value, axis: int) -> Complex:
    """A complex value from an axis that has the real plane first, then the imaginary one."""
    half = x.shape[axis] // 2
    return Complex(b.slice_axis(x, axis, 0, half), b.slice_axis(x, axis, half, 2 * half))


def _each(x: Complex, function: Callable[[Value], Value]) -> Complex:
    return Complex(function(x.real), function(x.imag))


def _transform(b: Builder, x: Sequence[Value], count: int, *, inverse: bool) -> Complex:
    """The first `count` elements of each row's transform, not normalised; x: stacks of planes, [P, R, N]."""
    _, rows, n = x[0].shape
    if n <= LARGEST:
        found = _product(b, x, _matrix(n, count, inverse=inverse), lambda p, m: b.dot(p, m, (0, 2), (0, 1), precision="highest"))
        return _apart(b, found, 1)
    factors = _factors(n)
    if factors is None:
        return _first(b, _as_convolution(b, x, inverse=inverse), count)
    first = factors[0]
    second = n // first
    parts = [b.reshape(p, (*p.shape[:2], first, second)) for p in x]
    matrix = _matrix(first, first, inverse=inverse)
    outer = _product(b, parts, matrix, lambda p, m: b.dot(m, p, (0, 1), (0, 2), precision="highest"))  # [2 N1, R, N2]
    turned = _turned(b, b.reshape(outer, (2, first, rows, second)), inverse=inverse)
    needed = -(-count // first)  # element k lies at [k % first, k // first]
    done = _transform(b, [b.reshape(turned, (2, first * rows, second))], needed, inverse=inverse)
    ordered = _each(done, lambda p: b.transpose(b.reshape(p, (first, rows, needed)), (1, 2, 0)))
    return _first(b, _each(ordered, lambda p: b.reshape(p, (rows, needed * first))), count)


def _turned(b: Builder, x: Value, *, inverse: bool) -> Value:
    """The planes x [2, N1, R, N2] times the twiddle factors: the roots of unity of the whole length."""
    _, first, _, second = x.shape
    roots = _roots(np.outer(np.arange(first), np.arange(second)), first * second, inverse=inverse)
    real, crossed = _constant(b, np.real(roots)), _constant(b, np.stack([-np.imag(roots), np.imag(roots)]))
    straight = b.mul(x, b.broadcast(real, x.shape, (1, 3)))
    return b.add(straight, b.mul(b.reverse(x, (0,)), b.broadcast(crossed, x.shape, (0, 1, 3))))


@functools.cache
def _factors(n: int) -> tuple[int, ...] | None:
    """n as a product of as few factors of at most LARGEST as can be, of these those with the least sum of 1 / f; None if it is none."""
    if n <= LARGEST:
        return (n,)
    found = [(f, *rest) for f in range(LARGEST, 1, -1) if n % f == 0 and (rest := _factors(n // f)) is not None]
    return min(found, key=lambda factors: (len(factors), sum(1 / f for f in factors)), default=None)


def _as_convolution(b: Builder, x: Sequence[Value], *, inverse: bool) -> Complex:
    """With jk = (j^2 + k^2 - (k - j)^2) / 2 the sum is a convolution with a chirp, done at a power of two that holds it."""
    n = x[0].shape[2]
    m = 1 << (2 * n - 2).bit_length()
    squares = np.arange(n) ** 2 % (2 * n)
    chirp = _roots(squares, 2 * n, inverse=inverse)
    moved = _each(_times(b, _planes(b, x), chirp), lambda p: b.pad(p, 0, (0, 0), (0, m - n)))
    around = np.zeros(m, np.complex128)
    around[:n] = np.exp((-2j if inverse else 2j) * np.pi * squares / (2 * n))
    around[m - n + 1 :] = around[1:n][::-1]
    product = _times(b, _transform(b, _stacks(b, moved), m, inverse=False), np.fft.fft(around) / m)
    return _times(b, _transform(b, _stacks(b, product), n, inverse=True), chirp)


def _planes(b: Builder, x: Sequence[Value]) -> Complex:
    """The complex value of stacks of planes."""
    planes = [b.reshape(b.slice_axis(p, 0, i, i + 1), p.shape[1:]) for p in x for i in range(p.shape[0])]
    return Complex(*planes) if len(planes) == 2 else as_complex(b, *planes)


def _times(b: Builder, x: Complex, row: np.ndarray) -> Complex:
    """Each row of [R, N] times a constant row."""
    planes = (b.broadcast(_constant(b, p), x.shape, (1,)) for p in (np.real(row), np.imag(row)))
    return numbers.mul(b, x, Complex(*planes))


def _product(b: Builder, x: Sequence[Value], matrix: np.ndarray, dot: Callable[[Value, Value], Value]) -> Value:
    """The sum over stacks of their products with the corresponding planes of a matrix."""
    starts = itertools.accumulate((p.shape[0] for p in x), initial=0)
    return functools.reduce(b.add, [dot(p, _constant(b, matrix[at : at + p.shape[0]])) for p, at in zip(x, starts, strict=False)])


def _matrix(n: int, count: int, *, inverse: bool) -> np.ndarray:
    """[2, N, 2 K]: what the real and the imaginary part of an element add to the first K real parts and the first K imaginary ones."""
    roots = _roots(np.outer(np.arange(n), np.arange(count)), n, inverse=inverse)
    return np.stack([np.concatenate([np.real(x), np.imag(x)], 1) for x in (roots, 1j * roots)])


def _roots(powers: np.ndarray, n: int, *, inverse: bool) -> np.ndarray:
    """exp(-2 pi i p / n), or with the other sign."""
    return np.exp((2j if inverse else -2j) * np.pi * (powers % n) / n)


def _constant(b: Builder, x: np.ndarray) -> Value:
    """A constant, rounded to f32."""
    return b.constant(x.astype(np.float32))
