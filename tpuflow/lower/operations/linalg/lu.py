"""LU factors with partial pivoting."""

from __future__ import annotations

from tpuflow.dtypes import S32
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.operations.complex import Number
from tpuflow.lower.operations.linalg.arithmetic import N, concatenate, div, each, mul, nonzero, product, rough_size, select, sub
from tpuflow.lower.operations.linalg.cholesky import solve_lower
from tpuflow.lower.operations.linalg.matrices import (
    BLOCK,
    batched,
    block_matrix,
    broadcast_like,
    column,
    iota_along,
    masked,
    repeat,
    row,
    submatrix,
    sum_along,
    take_rows,
    with_column,
    with_row,
)
from tpuflow.lower.operations.reductions import first_place_of


@batched(2)
def lu(b: Builder, a: Number) -> tuple[Number, Value, Value]:
    """(packed, pivots, permutation), as lax.linalg.lu: L and U in one array [..., M, N] without the unit diagonal of L; pivots
    s32[..., min(M, N)], the row with which each was exchanged; permutation s32[..., M], with a[permutation] = L U.
    """
    batch, m, _ = a.shape
    order = b.iota(TensorType(S32, (batch, m)), 1)
    if not all(a.shape):
        return a, b.full(TensorType(S32, (batch, min(a.shape[1:]))), 0), order
    return _factor(b, a)


def _factor(b: Builder, a: Number) -> tuple[Number, Value, Value]:
    """Right-looking: factor a panel column by column, permute the rows right of it, solve for U there, and update the trailing matrix."""
    _, m, n = a.shape
    width = min(m, n, BLOCK)
    panel, pivots, order = _panel(b, submatrix(b, a, (0, m), (0, width)))
    if width == n:
        return panel, pivots, order
    right = take_rows(b, submatrix(b, a, (0, m), (width, n)), order)
    above = solve_lower(b, submatrix(b, panel, (0, width), (0, width)), submatrix(b, right, (0, width), (0, n - width)), unit_diagonal=True)
    if width == m:
        return concatenate(b, (panel, above), 2), pivots, order
    below = submatrix(b, panel, (width, m), (0, width))
    rest = sub(b, submatrix(b, right, (width, m), (0, n - width)), product(b, below, above))
    rest, later, then = _factor(b, rest)
    whole = block_matrix(b, ((submatrix(b, panel, (0, width), (0, width)), above), (take_rows(b, below, then), rest)))
    tail = b.slice_axis(order, 1, width, m)
    tail = b.reshape(take_rows(b, b.reshape(tail, (*tail.shape, 1)), then), tail.shape)
    order = b.concatenate((b.slice_axis(order, 1, 0, width), tail), 1)
    return whole, b.concatenate((pivots, b.add(later, width)), 1), order


def _panel(b: Builder, a: Number) -> tuple[Number, Value, Value]:
    batch, m, n = a.shape
    order = b.iota(TensorType(S32, (batch, m, 1)), 1)
    pivots = b.full(TensorType(S32, (batch, n, 1)), 0)
    a, pivots, order = repeat(b, _column_of_factors, n, (a, pivots, order))
    return a, b.reshape(pivots, (batch, n)), b.reshape(order, (batch, m))


def _column_of_factors(b: Builder, j: Value, a: Number, pivots: Value, order: Value) -> tuple[Number, Value, Value]:
    """The largest element of what is left of column j becomes its pivot; the rows below lose their multiples of its row."""
    old = column(b, a, j)
    size = b.select(b.ge(iota_along(b, old, 1), broadcast_like(b, j, old)), rough_size(b, old), -1)
    pivot = b.reshape(first_place_of(b, "max", size, 1, S32), (a.shape[0], 1, 1))
    a, order = _exchanged(b, a, j, pivot), _exchanged(b, order, j, pivot)
    new, top = column(b, a, j), row(b, a, j)
    divisor = broadcast_like(b, row(b, new, j), new)
    below = b.gt(iota_along(b, new, 1), broadcast_like(b, j, new))
    new = select(b, b.and_(below, nonzero(b, divisor)), div(b, new, divisor), new)
    inner = b.and_(b.gt(iota_along(b, a, 1), broadcast_like(b, j, a)), b.gt(iota_along(b, a, 2), broadcast_like(b, j, a)))
    a = select(b, inner, sub(b, a, mul(b, broadcast_like(b, new, a), broadcast_like(b, top, a))), a)
    return with_column(b, a, new, j), with_row(b, pivots, pivot, j), order


def _exchanged(b: Builder, x: N, j: Value, other: Value) -> N:
    """x with rows j (s32[]) and `other` (s32[B, 1, 1]) exchanged."""
    there = b.eq(iota_along(b, x, 1), broadcast_like(b, other, x))
    first, second = row(b, x, j), sum_along(b, masked(b, there, x), 1)
    return with_row(b, each(lambda x, first: b.select(there, first, x), x, broadcast_like(b, first, x)), second, j)
