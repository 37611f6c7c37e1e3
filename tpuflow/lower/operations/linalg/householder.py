"""QR factorisation by Householder reflections, blocked by Schreiber and Van Loan's compact WY form."""

from __future__ import annotations

from tpuflow.dtypes import F32
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.operations.complex import Number
from tpuflow.lower.operations.linalg.arithmetic import (
    add,
    concatenate,
    conj,
    div,
    each,
    like,
    mul,
    neg,
    product,
    real,
    select,
    squared,
    sub,
)
from tpuflow.lower.operations.linalg.matrices import (
    BLOCK,
    adjoint,
    batched,
    block_matrix,
    broadcast_like,
    column,
    identity,
    iota_along,
    masked,
    repeat,
    row,
    submatrix,
    sum_along,
    transposed,
    triangle,
    with_column,
    with_row,
)


@batched(2)
def geqrf(b: Builder, a: Number) -> tuple[Number, Number]:
    """(packed [..., M, N], taus [..., min(M, N)]), as LAPACK's geqrf: R is the upper triangle of `packed`, with a real diagonal; below it
    are the vectors v, without their leading one, of the reflections H = 1 - tau v v^H whose product is Q.
    """
    batch, *sizes = a.shape
    if not all(a.shape):
        return a, like(b, b.full(TensorType(F32, (batch, min(sizes))), 0), a)
    whole, taus = _factor(b, a)
    return whole, each(lambda x: b.reshape(x, x.shape[:2]), taus)


def _factor(b: Builder, a: Number) -> tuple[Number, Number]:
    """Factor a panel of columns one by one, apply its reflections to the columns right of it at once, and go on with the rest."""
    batch, m, n = a.shape
    width = min(m, n, BLOCK)
    zeros = like(b, b.full(TensorType(F32, (batch, width, 1)), 0), a)
    panel, taus = repeat(b, _reflect_column, width, (submatrix(b, a, (0, m), (0, width)), zeros))
    if width == n:
        return panel, taus
    vectors = _vectors(b, panel)
    inner = adjoint(b, _wy_factor(b, vectors, taus))
    right = _reflected(b, vectors, inner, submatrix(b, a, (0, m), (width, n)))
    if width == m:
        return concatenate(b, (panel, right), 2), taus
    rest, later = _factor(b, submatrix(b, right, (width, m), (0, n - width)))
    top, bottom = (submatrix(b, panel, cut, (0, width)) for cut in ((0, width), (width, m)))
    whole = block_matrix(b, ((top, submatrix(b, right, (0, width), (0, n - width))), (bottom, rest)))
    return whole, concatenate(b, (taus, later), 1)


def _reflect_column(b: Builder, j: Value, a: Number, taus: Number) -> tuple[Number, Number]:
    """Column j below the diagonal becomes zero, its diagonal real; the columns right of it are reflected with it, by H^H."""
    old = column(b, a, j)
    at, here = iota_along(b, old, 1), broadcast_like(b, j, old)
    below = masked(b, b.gt(at, here), old)
    beta, tau, scale = _reflection(b, row(b, old, j), sum_along(b, squared(b, below), 1))
    vector = select(b, b.ne(at, here), div(b, below, broadcast_like(b, scale, below)), 1)
    along = mul(b, sum_along(b, mul(b, a, broadcast_like(b, conj(b, vector), a)), 1), broadcast_like(b, conj(b, tau), row(b, a, j)))
    less = sub(b, a, mul(b, broadcast_like(b, vector, a), broadcast_like(b, along, a)))
    a = select(b, b.gt(iota_along(b, a, 2), broadcast_like(b, j, a)), less, a)
    new = select(b, b.lt(at, here), old, select(b, b.eq(at, here), broadcast_like(b, beta, old), vector))
    return with_column(b, a, new, j), with_row(b, taus, tau, j)


def _reflection(b: Builder, alpha: Number, rest: Value) -> tuple[Value, Number, Number]:
    """(beta, tau, scale) of the reflection that maps a column (alpha, x), with |x|^2 = `rest`, to (beta, 0); its vector is (1, x / scale).

    As LAPACK's larfg: where alpha is real and `rest` is 0, the column stays as it is: beta = alpha, tau = 0.
    """
    norm = b.sqrt(b.add(squared(b, alpha), rest))
    something = b.ne(rest, 0) if isinstance(alpha, Value) else b.or_(b.ne(rest, 0), b.ne(alpha.imag, 0))
    beta = b.select(something, b.select(b.lt(real(alpha), 0), norm, b.neg(norm)), real(alpha))
    full = like(b, beta, alpha)
    tau = select(b, something, div(b, sub(b, full, alpha), beta), 0)
    return beta, tau, select(b, something, sub(b, alpha, full), 1)


def _vectors(b: Builder, panel: Number) -> Number:
    """The vectors [B, M, K] of the reflections: what is below the panel's diagonal, and ones on it."""
    return add(b, triangle(b, panel, lower=True, diagonal=-1), like(b, identity(b, *panel.shape), panel))


def _wy_factor(b: Builder, vectors: Number, taus: Number) -> Number:
    """The triangular factor T [B, K, K] of the compact WY form: H_1 ... H_K = 1 - V T V^H (LAPACK's larft)."""
    width = vectors.shape[2]

    def step(b: Builder, j: Value, products: Number, taus: Number, inner: Number) -> tuple[Number]:
        met, tau = column(b, products, j), row(b, taus, j)
        at, here = iota_along(b, met, 1), broadcast_like(b, j, met)
        met = masked(b, b.lt(at, here), met)
        added = mul(b, sum_along(b, mul(b, inner, broadcast_like(b, transposed(b, met), inner)), 2), broadcast_like(b, neg(b, tau), met))
        return (with_column(b, inner, select(b, b.eq(at, here), broadcast_like(b, tau, met), added), j),)

    start = like(b, b.full(TensorType(F32, (vectors.shape[0], width, width)), 0), vectors)
    return repeat(b, step, width, (start,), (product(b, adjoint(b, vectors), vectors), taus))[0]


def _reflected(b: Builder, vectors: Number, inner: Number, x: Number) -> Number:
    """(1 - V inner V^H) x."""
    return sub(b, x, product(b, vectors, product(b, inner, product(b, adjoint(b, vectors), x))))


@batched(2, 1)
def householder_product(b: Builder, a: Number, taus: Number) -> Number:
    """The first N columns of H_1 ... H_K, whose vectors are below the diagonal of a [..., M, N]; taus: [..., K]."""
    batch, m, n = a.shape
    count = taus.shape[1]
    result = like(b, identity(b, batch, m, n), a)
    taus = each(lambda x: b.reshape(x, (batch, count, 1)), taus)
    for first in reversed(range(0, count, BLOCK)):
        last = min(first + BLOCK, count)
        vectors = _vectors(b, submatrix(b, a, (first, m), (first, last)))
        inner = _wy_factor(b, vectors, submatrix(b, taus, (first, last), (0, 1)))
        lower = _reflected(b, vectors, inner, submatrix(b, result, (first, m), (0, n)))
        result = concatenate(b, (submatrix(b, result, (0, first), (0, n)), lower), 1)
    return result
