"""Eigenvalues of symmetric matrices by Jacobi's rotations, half as many at a time as there are rows.

Rows and columns are paired as Brent and Luk have it ("The solution of singular-value and symmetric eigenvalue problems on multiprocessor
arrays", 1985): the matrix is four blocks, their diagonals hold the pairs, and between two steps all but the first move on by one.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpuflow.dtypes import S32
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.operations import loops
from tpuflow.lower.operations.linalg.matrices import (
    batched,
    identity,
    piece,
    place,
    repeat,
    rows_at,
    spread,
    total,
    transposed,
    triangle,
)
from tpuflow.lower.operations.movement import iota
from tpuflow.lower.operations.sorting import sort

Blocks = tuple[Value, Value, Value, Value]
"""Top left, top right, bottom left, bottom right, [B, K, K] each."""


@batched(2)
def eigh(
    b: Builder, a: Value, *, lower: bool = True, sort_eigenvalues: bool = True, max_sweeps: int = 100, tolerance: float = 1e-6
) -> tuple[Value, Value]:
    """Eigenvectors, as columns [..., N, N], and eigenvalues [..., N], ascending if sorted, of a symmetric a, of which one triangle is read.

    Sweeps end when what is off the diagonal is at most `tolerance` of the whole (Euclidean norms), in every matrix of a batch.
    """
    batch, n, _ = a.shape
    if n < 2:
        return b.full_like(a, 1), b.reshape(a, (batch, n))
    half = triangle(b, a, lower=lower)
    whole = b.add(half, transposed(b, triangle(b, a, lower=lower, diagonal=-1 if lower else 1)))
    even = b.pad(whole, 0, (0, 0, 0), (0, n % 2, n % 2))
    values, rows = _sweeps(b, even, max_sweeps, tolerance)
    values, rows = b.slice_axis(values, 1, 0, n), piece(b, rows, (0, n), (0, n))
    if sort_eigenvalues:
        values, order = sort(b, (values, iota(b, S32, values.shape, 1)), 1)
        rows = rows_at(b, rows, order)
    return transposed(b, rows), values


def _sweeps(b: Builder, a: Value, max_sweeps: int, tolerance: float) -> tuple[Value, Value]:
    """Eigenvalues [B, N] and eigenvectors as rows [B, N, N], N even."""
    batch, n, _ = a.shape
    k = n // 2

    def going_on(b: Builder, sweep: Value, *state: Value) -> tuple[Value]:
        off, all_ = _norms(b, state[:4])
        far = b.reduce("or", b.gt(off, b.mul(all_, tolerance * tolerance)), (0, 1, 2))
        return (b.and_(far, b.lt(sweep, max_sweeps)),)

    def one_sweep(b: Builder, sweep: Value, *state: Value) -> tuple[Value, ...]:
        return (b.add(sweep, 1), *repeat(b, _step, n - 1, state))

    vectors = identity(b, batch, n, n)
    halves = (piece(b, vectors, (0, k), (0, n)), piece(b, vectors, (k, n), (0, n)))
    _, *done = loops.while_loop(b, going_on, one_sweep, (), (b.scalar(0, S32), *_cut(b, a, k), *halves))
    top, bottom = _diagonal(b, done[0]), _diagonal(b, done[3])
    return b.reshape(b.concatenate((top, bottom), 1), (batch, n)), b.concatenate(done[4:], 1)


def _cut(b: Builder, a: Value, k: int) -> Blocks:
    first, second = (0, k), (k, a.shape[1])
    return piece(b, a, first, first), piece(b, a, first, second), piece(b, a, second, first), piece(b, a, second, second)


def _norms(b: Builder, blocks: Sequence[Value]) -> tuple[Value, Value]:
    """The squared norms of what is off the diagonal, and of the diagonal with it, [B, 1, 1]."""
    squares = [b.mul(x, x) for x in blocks]
    on = [b.select(b.eq(place(b, x, 1), place(b, x, 2)), x, 0) for x in (squares[0], squares[3])]
    sums = [total(b, total(b, x, 2), 1) for x in (*squares, *on)]
    all_ = b.add(b.add(sums[0], sums[1]), b.add(sums[2], sums[3]))
    off = b.add(b.add(b.sub(sums[0], sums[4]), b.sub(sums[3], sums[5])), b.add(sums[1], sums[2]))
    return off, all_


def _diagonal(b: Builder, x: Value) -> Value:
    """[B, K, K] -> [B, K, 1]."""
    return total(b, b.select(b.eq(place(b, x, 1), place(b, x, 2)), x, 0), 2)


def _step(b: Builder, _: Value, tl: Value, tr: Value, bl: Value, br: Value, top: Value, bottom: Value) -> tuple[Value, ...]:
    """Every pair is rotated so that its off-diagonal element vanishes; then all but the first row and column move on."""
    p, q, r = (_diagonal(b, x) for x in (tl, br, tr))
    tangent = _tangent(b, p, q, r)
    cosine = b.reciprocal(b.sqrt(b.add(b.mul(tangent, tangent), 1)))  # more exact than rsqrt: what it errs by adds up
    sine = b.mul(tangent, cosine)
    shift = b.mul(tangent, r)
    (tl, bl), (tr, br), (top, bottom) = (_rotated(b, cosine, sine, *pair) for pair in ((tl, bl), (tr, br), (top, bottom)))
    across = transposed(b, cosine), transposed(b, sine)
    (tl, tr), (bl, br) = (_rotated(b, *across, *pair) for pair in ((tl, tr), (bl, br)))
    tl, br = _with_diagonal(b, tl, b.sub(p, shift)), _with_diagonal(b, br, b.add(q, shift))
    tr, bl = (_with_diagonal(b, x, b.full_like(p, 0)) for x in (tr, bl))
    (tl, tr), (bl, br) = _moved_on(b, tl, tr, 2), _moved_on(b, bl, br, 2)
    (tl, bl), (tr, br), (top, bottom) = (_moved_on(b, *pair, 1) for pair in ((tl, bl), (tr, br), (top, bottom)))
    return tl, tr, bl, br, top, bottom


def _tangent(b: Builder, p: Value, q: Value, r: Value) -> Value:
    """Of the smaller angle that makes [[p, r], [r, q]] diagonal (Golub and Van Loan, Matrix Computations, 8.5.2); 0 where r is."""
    none = b.eq(r, 0)
    tau = b.div(b.sub(q, p), b.mul(b.select(none, 1, r), 2))
    smaller = b.reciprocal(b.add(b.abs(tau), b.sqrt(b.add(b.mul(tau, tau), 1))))
    return b.select(none, 0, b.select(b.lt(tau, 0), b.neg(smaller), smaller))


def _rotated(b: Builder, cosine: Value, sine: Value, x: Value, y: Value) -> tuple[Value, Value]:
    """c x - s y and s x + c y."""
    c, s = spread(b, cosine, x), spread(b, sine, x)
    return b.sub(b.mul(c, x), b.mul(s, y)), b.add(b.mul(s, x), b.mul(c, y))


def _with_diagonal(b: Builder, x: Value, diagonal: Value) -> Value:
    return b.select(b.eq(place(b, x, 1), place(b, x, 2)), spread(b, diagonal, x), x)


def _moved_on(b: Builder, first: Value, second: Value, axis: int) -> tuple[Value, Value]:
    """Along an axis of size K of both: f0 s0 f1 ... f(K-2) and s1 ... s(K-1) f(K-1)."""
    k = first.shape[axis]
    if k == 1:
        return first, second

    def cut(x: Value, start: int, stop: int) -> Value:
        return b.slice_axis(x, axis, start, stop)

    return (
        b.concatenate((cut(first, 0, 1), cut(second, 0, 1), cut(first, 1, k - 1)), axis),
        b.concatenate((cut(second, 1, k), cut(first, k - 1, k)), axis),
    )
