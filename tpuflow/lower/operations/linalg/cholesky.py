"""Cholesky factors, and solutions of triangular systems."""

from __future__ import annotations

from tpuflow.dtypes import F32
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.operations.linalg.matrices import (
    BLOCK,
    assembled,
    batched,
    column,
    identity,
    piece,
    place,
    product,
    repeat,
    row,
    spread,
    total,
    transposed,
    triangle,
    with_column,
    with_row,
)


@batched(2)
def cholesky(b: Builder, a: Value, *, lower: bool = True) -> Value:
    """L with L L^T = a [..., N, N], of which the lower triangle is read (upper: U with U^T U = a, of the upper one).

    NaN everywhere if a is not positive definite, as LAPACK and so JAX have it.
    """
    factor = _factor(b, a if lower else transposed(b, a))
    eye = identity(b, *factor.shape)
    diagonal = total(b, b.select(b.gt(eye, 0), factor, 0), 2)
    good = b.reshape(b.reduce("and", b.gt(diagonal, 0), (1, 2)), (a.shape[0], 1, 1))
    factor = b.select(spread(b, good, factor), factor, float("nan"))
    factor = triangle(b, factor, lower=True)
    return factor if lower else transposed(b, factor)


def _factor(b: Builder, a: Value) -> Value:
    """Column by column in the first block; the rest less the product of what is below the block with itself."""
    batch, n, _ = a.shape
    if n <= BLOCK:
        return repeat(b, _column_of_factor, n, (a,))[0]
    first = _factor(b, piece(b, a, (0, BLOCK), (0, BLOCK)))
    below = transposed(b, solve_lower(b, first, transposed(b, piece(b, a, (BLOCK, n), (0, BLOCK)))))
    rest = _factor(b, b.sub(piece(b, a, (BLOCK, n), (BLOCK, n)), product(b, below, transposed(b, below))))
    return assembled(b, ((first, b.full(TensorType(F32, (batch, BLOCK, n - BLOCK)), 0)), (below, rest)))


def _column_of_factor(b: Builder, j: Value, a: Value) -> tuple[Value]:
    """Column j of L in the place of a's, its outer product taken from what is right of it."""
    old = column(b, a, j)
    root = b.sqrt(row(b, old, j))
    at, here = place(b, old, 1), spread(b, j, old)
    scaled = b.div(old, spread(b, root, old))
    below = b.select(b.gt(at, here), scaled, 0)
    rest = b.sub(a, b.mul(spread(b, below, a), spread(b, transposed(b, below), a)))
    new = b.select(b.eq(at, here), spread(b, root, old), b.select(b.gt(at, here), scaled, old))
    return (with_column(b, rest, new, j),)


@batched(2, 2)
def triangular_solve(b: Builder, a: Value, y: Value, *, left_side: bool, lower: bool, transpose_a: bool, unit_diagonal: bool) -> Value:
    """x with op(a) x = y (left_side) or x op(a) = y; op transposes if asked to. The other triangle of a is not read.

    a: [..., N, N]; y: [..., N, K], or [..., K, N]. All forms are the one of a lower triangle on the left.
    """
    if transpose_a == left_side:  # x op(a) = y is op(a)^T x^T = y^T
        a, lower = transposed(b, a), not lower
    y = y if left_side else transposed(b, y)
    if not lower:
        a, y = b.reverse(a, (1, 2)), b.reverse(y, (1,))
    x = solve_lower(b, a, y, unit_diagonal=unit_diagonal)
    x = x if lower else b.reverse(x, (1,))
    return x if left_side else transposed(b, x)


def solve_lower(b: Builder, a: Value, y: Value, *, unit_diagonal: bool = False) -> Value:
    """x with the lower triangle of a [B, N, N] times x = y [B, N, K]: rows of a block one after the other, products between blocks."""
    n, k = y.shape[1:]
    if n > BLOCK:
        first = solve_lower(b, piece(b, a, (0, BLOCK), (0, BLOCK)), piece(b, y, (0, BLOCK), (0, k)), unit_diagonal=unit_diagonal)
        left = b.sub(piece(b, y, (BLOCK, n), (0, k)), product(b, piece(b, a, (BLOCK, n), (0, BLOCK)), first))
        rest = solve_lower(b, piece(b, a, (BLOCK, n), (BLOCK, n)), left, unit_diagonal=unit_diagonal)
        return b.concatenate((first, rest), 1)

    def step(b: Builder, j: Value, a: Value, x: Value) -> tuple[Value]:
        """Row j is done; its share is taken from the rows below."""
        factors, value = column(b, a, j), row(b, x, j)
        value = value if unit_diagonal else b.div(value, spread(b, row(b, factors, j), value))
        less = b.sub(x, b.mul(spread(b, factors, x), spread(b, value, x)))
        x = b.select(b.gt(place(b, x, 1), spread(b, j, x)), less, x)
        return (with_row(b, x, value, j),)

    return repeat(b, step, n, (y,), (a,))[0]
