"""Fourier transforms of any length as products on the matrix unit.

A length of at most LARGEST is one product with the matrix of its roots of unity. Others are factored (Cooley and Tukey, 1965) into few and
similar factors: a product by f roots takes a row of f for every f elements, so 1024 = 32 x 32 takes the matrix unit 64
rows where 128 x 8 takes 136, and half as many multiplications. Lengths that have a prime factor beyond LARGEST become a convolution of a
length that has none (Bluestein, 1970).

The rows are [R, 2, M, K] between two products, their real and imaginary planes side by side: the next product contracts over the planes
as well, and its result has both again. M counts the digits of an element's place that are still to be transformed, K those of the result's
place that are found: each product takes the first digit off M and puts one before K (Stockham's order; Cochran et al., 1967), so that the
last one leaves the elements in order, and the lanes get fuller from product to product.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from tpuflow.isa.contraction import Contraction
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.operations import complex as numbers
from tpuflow.lower.operations.complex import Complex, Number, as_complex

LARGEST = 128
"""The side of most chips' matrix arrays."""

ROW, PLANE, DIGIT, LEFT, DONE, OUT_PLANE, OUT_DIGIT = range(7)
"""Labels of a product's axes: see `_product`."""


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
    """The planes of [R, N] as stacks of one, [R, 1, N, 1], without one of zeros."""
    planes = [x.real] if b.known(x.imag) == 0 else [x.real, x.imag]
    return [b.reshape(p, (p.shape[0], 1, p.shape[1], 1)) for p in planes]


def _each(x: Complex, function: Callable[[Value], Value]) -> Complex:
    return Complex(function(x.real), function(x.imag))


def _transform(b: Builder, x: Sequence[Value], count: int, *, inverse: bool) -> Complex:
    """The first `count` elements of each row's transform, not normalised; x: stacks of planes, [R, P, N, 1]."""
    rows, _, n, _ = x[0].shape
    factors = _factors(n)
    if factors is None:
        return _first(b, _as_convolution(b, x, inverse=inverse), count)
    *inner, last = factors
    for factor in inner:  # [R, P, F M, K] -> [R, 2, M, F K]
        x = [_turned(b, _product(b, x, _matrix(factor, factor, inverse=inverse)), factor, inverse=inverse)]
    needed = -(-count * last // n)
    found = b.reshape(_product(b, x, _matrix(last, needed, inverse=inverse)), (rows, 2, needed * n // last))
    return Complex(*(b.reshape(b.slice(found, (0, plane, 0), (rows, plane + 1, count)), (rows, count)) for plane in range(2)))


def _turned(b: Builder, x: Value, factor: int, *, inverse: bool) -> Value:
    """The rows x [R, 2, M, F K], after the product of the factor F, times the twiddle factors: the roots of unity of length F M."""
    *_, left, done = x.shape
    roots = _roots(np.outer(np.arange(left), np.arange(factor)), factor * left, inverse=inverse).repeat(done // factor, 1)
    real, crossed = _constant(b, np.real(roots)), _constant(b, np.stack([-np.imag(roots), np.imag(roots)]))
    straight = b.mul(x, b.broadcast(real, x.shape, (2, 3)))
    return b.add(straight, b.mul(b.reverse(x, (1,)), b.broadcast(crossed, x.shape, (1, 2, 3))))


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
    """The complex value of stacks of one plane."""
    planes = [b.reshape(p, (p.shape[0], p.shape[2])) for p in x]
    return Complex(*planes) if len(planes) == 2 else as_complex(b, *planes)


def _times(b: Builder, x: Complex, row: np.ndarray) -> Complex:
    """Each row of [R, N] times a constant row."""
    planes = (b.broadcast(_constant(b, p), x.shape, (1,)) for p in (np.real(row), np.imag(row)))
    return numbers.mul(b, x, Complex(*planes))


def _product(b: Builder, x: Sequence[Value], matrix: np.ndarray) -> Value:
    """The sum over stacks [R, P, F M, K] of their products with the corresponding planes of a matrix [2, F, 2, F']: [R, 2, M, F' K]."""
    starts = itertools.accumulate((p.shape[1] for p in x), initial=0)
    return functools.reduce(b.add, [_one_product(b, p, matrix[at : at + p.shape[1]]) for p, at in zip(x, starts, strict=False)])


def _one_product(b: Builder, x: Value, matrix: np.ndarray) -> Value:
    """[R, P, F M, K] times [P, F, 2, F']: [R, 2, M, F' K]."""
    (rows, planes, places, done), (_, factor, _, kept) = x.shape, matrix.shape
    sizes = {
        ROW: rows, PLANE: planes, DIGIT: factor, LEFT: places // factor, DONE: done, OUT_PLANE: 2, OUT_DIGIT: kept,
    }  # fmt: skip
    absent = {label for label in (PLANE, LEFT, DONE) if sizes[label] == 1}
    lhs, rhs, out = (
        tuple(label for label in labels if label not in absent)
        for labels in ((ROW, PLANE, DIGIT, LEFT, DONE), (PLANE, DIGIT, OUT_PLANE, OUT_DIGIT), (ROW, OUT_PLANE, LEFT, OUT_DIGIT, DONE))
    )
    shapes = [[sizes[label] for label in labels] for labels in (lhs, rhs, out)]
    operands = b.reshape(x, shapes[0]), _constant(b, matrix.reshape(shapes[1]))
    return b.reshape(b.conv(*operands, Contraction(lhs, rhs, out), shapes[2], "highest"), (rows, 2, places // factor, kept * done))


def _matrix(n: int, count: int, *, inverse: bool) -> np.ndarray:
    """[2, N, 2, K]: what the real and the imaginary part of an element add to the first K real parts and the first K imaginary ones."""
    roots = _roots(np.outer(np.arange(n), np.arange(count)), n, inverse=inverse)
    return np.stack([np.stack([np.real(x), np.imag(x)], 1) for x in (roots, 1j * roots)])


def _roots(powers: np.ndarray, n: int, *, inverse: bool) -> np.ndarray:
    """exp(-2 pi i p / n), or with the other sign."""
    return np.exp((2j if inverse else -2j) * np.pi * (powers % n) / n)


def _constant(b: Builder, x: np.ndarray) -> Value:
    """A constant, rounded to f32."""
    return b.constant(x.astype(np.float32))
