"""Eigenvalues of symmetric and Hermitian matrices by Jacobi rotations, N / 2 of them at a time.

Rows and columns are paired as Brent and Luk have it ("The solution of singular-value and symmetric eigenvalue problems on multiprocessor
arrays", 1985): the matrix is four blocks, their diagonals hold the pairs, and between two steps all but the first move on by one.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpuflow.dtypes import S32
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.operations import complex as numbers
from tpuflow.lower.operations import loops
from tpuflow.lower.operations.complex import Complex, Number, packed, planes
from tpuflow.lower.operations.linalg.arithmetic import add, concatenate, conj, each, like, mul, real, select, squared, sub
from tpuflow.lower.operations.linalg.matrices import (
    adjoint,
    batched,
    broadcast_like,
    diagonal,
    identity,
    iota_along,
    repeat,
    submatrix,
    sum_along,
    take_rows,
    transposed,
    triangle,
)
from tpuflow.lower.operations.movement import iota
from tpuflow.lower.operations.sorting import sort

Blocks = tuple[Number, Number, Number, Number]
"""Top left, top right, bottom left, bottom right, [B, K, K] each."""


@batched(2)
def eigh(
    b: Builder, a: Number, *, lower: bool = True, sort_eigenvalues: bool = True, max_sweeps: int = 100, tolerance: float = 1e-6
) -> tuple[Number, Value]:
    """Eigenvectors, as columns [..., N, N], and eigenvalues [..., N], ascending if sorted, of a symmetric or Hermitian a, of which one
    triangle is read, and of its diagonal the real part.

    Sweeps end when what is off the diagonal is at most `tolerance` of the whole (Euclidean norms), in every matrix of a batch.
    """
    batch, n, _ = a.shape
    if n < 2:
        return like(b, b.full_like(real(a), 1), a), b.reshape(real(a), (batch, n))
    half = triangle(b, a, lower=lower)
    whole = add(b, half, adjoint(b, triangle(b, a, lower=lower, diagonal=-1 if lower else 1)))
    even = each(lambda x: b.pad(x, 0, (0, 0, 0), (0, n % 2, n % 2)), whole)
    values, rows = _sweeps(b, even, max_sweeps, tolerance)
    values, rows = b.slice_axis(values, 1, 0, n), submatrix(b, rows, (0, n), (0, n))
    if sort_eigenvalues:
        values, order = sort(b, (values, iota(b, S32, values.shape, 1)), 1)
        rows = take_rows(b, rows, order)
    return adjoint(b, rows), values


def _sweeps(b: Builder, a: Number, max_sweeps: int, tolerance: float) -> tuple[Value, Number]:
    """Eigenvalues [B, N] and, as rows [B, N, N], eigenvectors (conjugated), N even."""
    batch, n, _ = a.shape
    k = n // 2
    vectors = like(b, identity(b, batch, n, n), a)
    state = (*_cut(b, a, k), submatrix(b, vectors, (0, k), (0, n)), submatrix(b, vectors, (k, n), (0, n)))
    types = [x.type for x in state]

    def going_on(b: Builder, sweep: Value, *arrays: Value) -> tuple[Value]:
        off, all_ = _norms(b, packed(arrays, types)[:4])
        far = b.reduce("or", b.gt(off, b.mul(all_, tolerance * tolerance)), (0, 1, 2))
        return (b.and_(far, b.lt(sweep, max_sweeps)),)

    def one_sweep(b: Builder, sweep: Value, *arrays: Value) -> tuple[Value, ...]:
        return (b.add(sweep, 1), *planes(repeat(b, _step, n - 1, packed(arrays, types))))

    _, *arrays = loops.while_loop(b, going_on, one_sweep, (), (b.scalar(0, S32), *planes(state)))
    done = packed(arrays, types)
    top, bottom = diagonal(b, real(done[0])), diagonal(b, real(done[3]))
    return b.reshape(b.concatenate((top, bottom), 1), (batch, n)), concatenate(b, done[4:], 1)


def _cut(b: Builder, a: Number, k: int) -> Blocks:
    first, second = (0, k), (k, a.shape[1])
    return submatrix(b, a, first, first), submatrix(b, a, first, second), submatrix(b, a, second, first), submatrix(b, a, second, second)


def _norms(b: Builder, blocks: Sequence[Number]) -> tuple[Value, Value]:
    """The squared norms of what is off the diagonal, and of the diagonal with it, [B, 1, 1]."""
    squares = [squared(b, x) for x in blocks]
    on = [b.select(b.eq(iota_along(b, x, 1), iota_along(b, x, 2)), x, 0) for x in (squares[0], squares[3])]
    sums = [sum_along(b, sum_along(b, x, 2), 1) for x in (*squares, *on)]
    all_ = b.add(b.add(sums[0], sums[1]), b.add(sums[2], sums[3]))
    off = b.add(b.add(b.sub(sums[0], sums[4]), b.sub(sums[3], sums[5])), b.add(sums[1], sums[2]))
    return off, all_


def _step(
    b: Builder, _: Value, tl: Number, tr: Number, bl: Number, br: Number, top: Number, bottom: Number
) -> tuple[Number, ...]:  # fmt: skip
    """Every pair is rotated so that its off-diagonal element vanishes; then all but the first row and column move on."""
    p, q, r = diagonal(b, real(tl)), diagonal(b, real(br)), diagonal(b, tr)
    if isinstance(r, Complex):
        r, (tr, bl, br, bottom) = _with_real_pivots(b, r, tr, bl, br, bottom)
    tangent = _tangent(b, p, q, r)
    cosine = b.reciprocal(b.sqrt(b.add(b.mul(tangent, tangent), 1)))  # more exact than rsqrt: what it errs by adds up
    sine = b.mul(tangent, cosine)
    shift = b.mul(tangent, r)
    (tl, bl), (tr, br), (top, bottom) = (_rotated(b, cosine, sine, *pair) for pair in ((tl, bl), (tr, br), (top, bottom)))
    across = transposed(b, cosine), transposed(b, sine)
    (tl, tr), (bl, br) = (_rotated(b, *across, *pair) for pair in ((tl, tr), (bl, br)))
    tl, br = _with_diagonal(b, tl, b.sub(p, shift)), _with_diagonal(b, br, b.add(q, shift))
    tr, bl = (_with_diagonal(b, x, b.full_like(p, 0)) for x in (tr, bl))
    (tl, tr), (bl, br) = _exchanged_pairs(b, tl, tr, 2), _exchanged_pairs(b, bl, br, 2)
    (tl, bl), (tr, br), (top, bottom) = (_exchanged_pairs(b, *pair, 1) for pair in ((tl, bl), (tr, br), (top, bottom)))
    return tl, tr, bl, br, top, bottom


def _with_real_pivots(b: Builder, r: Complex, tr: Number, bl: Number, br: Number, bottom: Number) -> tuple[Value, tuple[Number, ...]]:
    """Multiply the second row and column of every pair by the phase of its off-diagonal element r, which makes r real: (|r|, (tr, bl, br,
    bottom) after that).
    """
    size = numbers.absolute(b, r)
    turn = select(b, b.ne(size, 0), numbers.sign_of(b, r), 1)
    back = conj(b, transposed(b, turn))
    bl, br, bottom = (mul(b, x, broadcast_like(b, turn, x)) for x in (bl, br, bottom))
    tr, br = (mul(b, x, broadcast_like(b, back, x)) for x in (tr, br))
    return size, (tr, bl, br, bottom)


def _tangent(b: Builder, p: Value, q: Value, r: Value) -> Value:
    """The tangent of the smaller angle that diagonalises [[p, r], [r, q]] (Golub and Van Loan, Matrix Computations, 8.5.2); 0 if r is."""
    none = b.eq(r, 0)
    tau = b.div(b.sub(q, p), b.mul(b.select(none, 1, r), 2))
    smaller = b.reciprocal(b.add(b.abs(tau), b.sqrt(b.add(b.mul(tau, tau), 1))))
    return b.select(none, 0, b.select(b.lt(tau, 0), b.neg(smaller), smaller))


def _rotated(b: Builder, cosine: Value, sine: Value, x: Number, y: Number) -> tuple[Number, Number]:
    """c x - s y and s x + c y."""
    c, s = broadcast_like(b, cosine, x), broadcast_like(b, sine, x)
    return sub(b, mul(b, x, c), mul(b, y, s)), add(b, mul(b, x, s), mul(b, y, c))


def _with_diagonal(b: Builder, x: Number, values: Value) -> Number:
    return select(b, b.eq(iota_along(b, x, 1), iota_along(b, x, 2)), broadcast_like(b, values, x), x)


def _exchanged_pairs(b: Builder, first: Number, second: Number, axis: int) -> tuple[Number, Number]:
    """Brent and Luk's next pairing: along an axis of size K the halves become (f0 s0 f1 ... f(K-2)) and (s1 ... s(K-1) f(K-1))."""
    k = first.shape[axis]
    if k == 1:
        return first, second

    def cut(x: Number, start: int, stop: int) -> Number:
        return each(lambda x: b.slice_axis(x, axis, start, stop), x)

    return (
        concatenate(b, (cut(first, 0, 1), cut(second, 0, 1), cut(first, 1, k - 1)), axis),
        concatenate(b, (cut(second, 1, k), cut(first, k - 1, k)), axis),
    )
