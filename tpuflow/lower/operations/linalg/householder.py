"""QR factors by Householder's reflections, those of a block put together in Schreiber and Van Loan's compact WY form."""

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
    assembled,
    batched,
    column,
    identity,
    kept,
    piece,
    place,
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
def geqrf(b: Builder, a: Number) -> tuple[Number, Number]:
    """R in the upper triangle of a [..., M, N], below it the vectors of the reflections H = 1 - tau v v^H (v's one left out) whose product
    is Q; taus [..., min(M, N)]. Signs as LAPACK has them: R's diagonal is real."""
    batch, *sizes = a.shape
    if not all(a.shape):
        return a, like(b, b.full(TensorType(F32, (batch, min(sizes))), 0), a)
    whole, taus = _factor(b, a)
    return whole, each(lambda x: b.reshape(x, x.shape[:2]), taus)


def _factor(b: Builder, a: Number) -> tuple[Number, Number]:
    """The first columns one after the other; what is right of them is reflected by all of theirs at once."""
    batch, m, n = a.shape
    width = min(m, n, BLOCK)
    zeros = like(b, b.full(TensorType(F32, (batch, width, 1)), 0), a)
    panel, taus = repeat(b, _reflect_column, width, (piece(b, a, (0, m), (0, width)), zeros))
    if width == n:
        return panel, taus
    vectors = _vectors(b, panel)
    inner = adjoint(b, _together(b, vectors, taus))
    right = _reflected(b, vectors, inner, piece(b, a, (0, m), (width, n)))
    if width == m:
        return concatenate(b, (panel, right), 2), taus
    rest, later = _factor(b, piece(b, right, (width, m), (0, n - width)))
    top, bottom = (piece(b, panel, cut, (0, width)) for cut in ((0, width), (width, m)))
    whole = assembled(b, ((top, piece(b, right, (0, width), (0, n - width))), (bottom, rest)))
    return whole, concatenate(b, (taus, later), 1)


def _reflect_column(b: Builder, j: Value, a: Number, taus: Number) -> tuple[Number, Number]:
    """Column j below the diagonal becomes zero, its diagonal real; the columns right of it are reflected with it, by H^H."""
    old = column(b, a, j)
    at, here = place(b, old, 1), spread(b, j, old)
    below = kept(b, b.gt(at, here), old)
    beta, tau, scale = _reflection(b, row(b, old, j), total(b, squared(b, below), 1))
    vector = select(b, b.ne(at, here), div(b, below, spread(b, scale, below)), 1)
    along = mul(b, total(b, mul(b, a, spread(b, conj(b, vector), a)), 1), spread(b, conj(b, tau), row(b, a, j)))
    less = sub(b, a, mul(b, spread(b, vector, a), spread(b, along, a)))
    a = select(b, b.gt(place(b, a, 2), spread(b, j, a)), less, a)
    new = select(b, b.lt(at, here), old, select(b, b.eq(at, here), spread(b, beta, old), vector))
    return with_column(b, a, new, j), with_row(b, taus, tau, j)


def _reflection(b: Builder, alpha: Number, rest: Value) -> tuple[Value, Number, Number]:
    """Of a column that begins with alpha and has the squared norm `rest` below: what it becomes, tau, and what v is divided by. Nothing is
    to be done where alpha is real and nothing is below it."""
    norm = b.sqrt(b.add(squared(b, alpha), rest))
    something = b.ne(rest, 0) if isinstance(alpha, Value) else b.or_(b.ne(rest, 0), b.ne(alpha.imag, 0))
    beta = b.select(something, b.select(b.lt(real(alpha), 0), norm, b.neg(norm)), real(alpha))
    full = like(b, beta, alpha)
    tau = select(b, something, div(b, sub(b, full, alpha), beta), 0)
    return beta, tau, select(b, something, sub(b, alpha, full), 1)


def _vectors(b: Builder, panel: Number) -> Number:
    """The reflections' vectors [B, M, K], with their ones, out of what is below a diagonal."""
    return add(b, triangle(b, panel, lower=True, diagonal=-1), like(b, identity(b, *panel.shape), panel))


def _together(b: Builder, vectors: Number, taus: Number) -> Number:
    """T [B, K, K] with H_1 ... H_K = 1 - V T V^H."""
    width = vectors.shape[2]

    def step(b: Builder, j: Value, products: Number, taus: Number, inner: Number) -> tuple[Number]:
        met, tau = column(b, products, j), row(b, taus, j)
        at, here = place(b, met, 1), spread(b, j, met)
        met = kept(b, b.lt(at, here), met)
        added = mul(b, total(b, mul(b, inner, spread(b, transposed(b, met), inner)), 2), spread(b, neg(b, tau), met))
        return (with_column(b, inner, select(b, b.eq(at, here), spread(b, tau, met), added), j),)

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
        vectors = _vectors(b, piece(b, a, (first, m), (first, last)))
        inner = _together(b, vectors, piece(b, taus, (first, last), (0, 1)))
        lower = _reflected(b, vectors, inner, piece(b, result, (first, m), (0, n)))
        result = concatenate(b, (piece(b, result, (0, first), (0, n)), lower), 1)
    return result
