"""Cholesky factors, and solutions of triangular systems."""

from __future__ import annotations

from tpuflow.dtypes import F32
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.operations.complex import Number
from tpuflow.lower.operations.linalg.arithmetic import concatenate, conj, div, each, mul, product, real, select, sub
from tpuflow.lower.operations.linalg.matrices import (
    BLOCK,
    adjoint,
    batched,
    block_matrix,
    broadcast_like,
    column,
    diagonal,
    iota_along,
    repeat,
    row,
    submatrix,
    transposed,
    triangle,
    with_column,
    with_row,
)


@batched(2)
def cholesky(b: Builder, a: Number, *, lower: bool = True) -> Number:
    """L with L L^H = a [..., N, N]; only the lower triangle of a is read. With lower=False, U with U^H U = a from the upper one. The
    diagonal of a is taken to be real.

    NaN everywhere if a is not positive definite, as LAPACK and so JAX have it.
    """
    factor = _factor(b, a if lower else adjoint(b, a))
    roots = diagonal(b, real(factor))
    good = b.reshape(b.reduce("and", b.gt(roots, 0), (1, 2)), (a.shape[0], 1, 1))
    factor = each(lambda x: b.select(broadcast_like(b, good, x), x, float("nan")), factor)
    factor = triangle(b, factor, lower=True)
    return factor if lower else adjoint(b, factor)


def _factor(b: Builder, a: Number) -> Number:
    """Right-looking: factor the first block column by column, solve for the rows below it, and update the trailing matrix."""
    batch, n, _ = a.shape
    if n <= BLOCK:
        return repeat(b, _column_of_factor, n, (a,))[0]
    first = _factor(b, submatrix(b, a, (0, BLOCK), (0, BLOCK)))
    below = adjoint(b, solve_lower(b, first, adjoint(b, submatrix(b, a, (BLOCK, n), (0, BLOCK)))))
    rest = _factor(b, sub(b, submatrix(b, a, (BLOCK, n), (BLOCK, n)), product(b, below, adjoint(b, below))))
    return block_matrix(b, ((first, b.full(TensorType(F32, (batch, BLOCK, n - BLOCK)), 0)), (below, rest)))


def _column_of_factor(b: Builder, j: Value, a: Number) -> tuple[Number]:
    """Column j of a becomes that of L, and its outer product with itself is subtracted from the columns to its right."""
    old = column(b, a, j)
    root = b.sqrt(real(row(b, old, j)))
    at, here = iota_along(b, old, 1), broadcast_like(b, j, old)
    scaled = div(b, old, broadcast_like(b, root, old))
    below = select(b, b.gt(at, here), scaled, 0)
    rest = sub(b, a, mul(b, broadcast_like(b, below, a), broadcast_like(b, adjoint(b, below), a)))
    new = select(b, b.eq(at, here), broadcast_like(b, root, old), select(b, b.gt(at, here), scaled, old))
    return (with_column(b, rest, new, j),)


@batched(2, 2)
def triangular_solve(
    b: Builder, a: Number, y: Number, *, left_side: bool, lower: bool, transpose_a: bool, unit_diagonal: bool, conjugate_a: bool = False
) -> Number:
    """x with op(a) x = y (left_side) or x op(a) = y; op transposes and conjugates if asked to. The other triangle of a is not read.

    a: [..., N, N]; y: [..., N, K], or [..., K, N]. All forms are the one of a lower triangle on the left.
    """
    a = conj(b, a) if conjugate_a else a
    if transpose_a == left_side:  # x op(a) = y is op(a)^T x^T = y^T
        a, lower = transposed(b, a), not lower
    y = y if left_side else transposed(b, y)
    if not lower:
        a, y = each(lambda x: b.reverse(x, (1, 2)), a), each(lambda x: b.reverse(x, (1,)), y)
    x = solve_lower(b, a, y, unit_diagonal=unit_diagonal)
    x = x if lower else each(lambda x: b.reverse(x, (1,)), x)
    return x if left_side else transposed(b, x)


def solve_lower(b: Builder, a: Number, y: Number, *, unit_diagonal: bool = False) -> Number:
    """x with the lower triangle of a [B, N, N] times x = y [B, N, K]: rows of a block one after the other, products between blocks."""
    n, k = y.shape[1:]
    if n > BLOCK:
        first = solve_lower(b, submatrix(b, a, (0, BLOCK), (0, BLOCK)), submatrix(b, y, (0, BLOCK), (0, k)), unit_diagonal=unit_diagonal)
        left = sub(b, submatrix(b, y, (BLOCK, n), (0, k)), product(b, submatrix(b, a, (BLOCK, n), (0, BLOCK)), first))
        rest = solve_lower(b, submatrix(b, a, (BLOCK, n), (BLOCK, n)), left, unit_diagonal=unit_diagonal)
        return concatenate(b, (first, rest), 1)

    def step(b: Builder, j: Value, a: Number, x: Number) -> tuple[Number]:
        """Row j is done; its share is taken from the rows below."""
        factors, value = column(b, a, j), row(b, x, j)
        value = value if unit_diagonal else div(b, value, broadcast_like(b, row(b, factors, j), value))
        less = sub(b, x, mul(b, broadcast_like(b, factors, x), broadcast_like(b, value, x)))
        x = select(b, b.gt(iota_along(b, x, 1), broadcast_like(b, j, x)), less, x)
        return (with_row(b, x, value, j),)

    return repeat(b, step, n, (y,), (a,))[0]
