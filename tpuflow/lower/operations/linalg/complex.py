"""Cholesky factors and triangular systems of complex matrices, by the same of real ones.

A complex matrix [..., M, N] is the real one [..., 2M, 2N] that has [[r, -i], [i, r]] in the place of each number (r, i): sums, products
and adjoints of the one are those of the other. A triangle with real numbers on its diagonal becomes a triangle again.
"""

from __future__ import annotations

from tpuflow.dtypes import S32
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.operations.complex import Complex, conj, div
from tpuflow.lower.operations.linalg import cholesky as real
from tpuflow.lower.operations.movement import stack


def cholesky(b: Builder, a: Complex, *, lower: bool = True) -> Complex:
    """L with L L^H = a [..., N, N], of which the lower triangle is read (upper: U with U^H U = a, of the upper one). The diagonal of a is
    taken to be real, that of the result is."""
    triangle = _with_diagonal(b, a if lower else _adjoint(b, a), None, 0)
    factor = _with_diagonal(b, _taken(b, real.cholesky(b, _embedded(b, triangle))), None, 0)
    return factor if lower else _adjoint(b, factor)


def triangular_solve(
    b: Builder, a: Complex, y: Complex, *, left_side: bool, lower: bool, transpose_a: bool, conjugate_a: bool, unit_diagonal: bool
) -> Complex:
    """x with op(a) x = y (left_side) or x op(a) = y; op transposes and conjugates if asked to. The other triangle of a is not read.

    The diagonal D is divided out: a = D U, and of U it is ones.
    """
    a = conj(b, a) if conjugate_a else a
    if unit_diagonal:
        return _solve_unit(b, a, y, left_side=left_side, lower=lower, transpose_a=transpose_a)
    diagonal = _diagonal(b, a)
    along = len(a.shape) - (2 if left_side else 1)
    unit = div(b, a, _spread(b, diagonal, a.shape, len(a.shape) - 2))
    first = left_side != transpose_a  # whether D meets y before U does
    y = div(b, y, _spread(b, diagonal, y.shape, along)) if first else y
    x = _solve_unit(b, unit, y, left_side=left_side, lower=lower, transpose_a=transpose_a)
    return x if first else div(b, x, _spread(b, diagonal, y.shape, along))


def _solve_unit(b: Builder, a: Complex, y: Complex, *, left_side: bool, lower: bool, transpose_a: bool) -> Complex:
    """With ones on the diagonal. The real matrix transposed is the complex one's adjoint."""
    a = _with_diagonal(b, conj(b, a) if transpose_a else a, 1, 0)
    x = real.triangular_solve(
        b, _embedded(b, a), _embedded(b, y), left_side=left_side, lower=lower, transpose_a=transpose_a, unit_diagonal=True
    )
    return _taken(b, x)


def _embedded(b: Builder, x: Complex) -> Value:
    """[..., M, N] -> [..., 2M, 2N]."""
    *batch, m, n = x.shape
    axis = len(x.shape)
    upper, below = (stack(b, *pair, axis=axis) for pair in ((x.real, b.neg(x.imag)), (x.imag, x.real)))  # [..., M, N, 2]
    return b.reshape(stack(b, upper, below, axis=axis - 1), (*batch, 2 * m, 2 * n))  # of [..., M, 2, N, 2]


def _taken(b: Builder, x: Value) -> Complex:
    """The complex matrix that was embedded: the first of every two columns."""
    axis = len(x.shape) - 1
    columns = b.slice_axis(x, axis, 0, x.shape[axis], 2)
    rows = [b.slice_axis(columns, axis - 1, start, x.shape[axis - 1], 2) for start in range(2)]
    return Complex(*rows)


def _on_diagonal(b: Builder, shape: tuple[int, ...]) -> Value:
    kind, rank = TensorType(S32, shape), len(shape)
    return b.eq(b.iota(kind, rank - 2), b.iota(kind, rank - 1))


def _with_diagonal(b: Builder, x: Complex, real_part: float | None, imag_part: float) -> Complex:
    """x with these numbers on its diagonal (None: its own)."""
    here = _on_diagonal(b, x.shape)
    plane = x.real if real_part is None else b.select(here, real_part, x.real)
    return Complex(plane, b.select(here, imag_part, x.imag))


def _diagonal(b: Builder, x: Complex) -> Complex:
    """Of [..., N, N]: [..., N]."""
    here = _on_diagonal(b, x.shape)
    return Complex(*(b.reduce("add", b.select(here, plane, 0), (len(x.shape) - 1,)) for plane in (x.real, x.imag)))


def _spread(b: Builder, x: Complex, shape: tuple[int, ...], axis: int) -> Complex:
    """[..., N] along an axis of the shape, the same along the other of the last two."""
    axes = (*range(len(shape) - 2), axis)
    return Complex(*(b.broadcast(plane, shape, axes) for plane in (x.real, x.imag)))


def _adjoint(b: Builder, x: Complex) -> Complex:
    *batch, row, column = range(len(x.shape))
    return conj(b, Complex(*(b.transpose(plane, (*batch, column, row)) for plane in (x.real, x.imag))))
