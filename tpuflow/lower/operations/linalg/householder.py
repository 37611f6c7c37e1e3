"""QR factors by Householder's reflections, those of a block put together in Schreiber and Van Loan's compact WY form."""

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
def geqrf(b: Builder, a: Value) -> tuple[Value, Value]:
    """R in the upper triangle of a [..., M, N], below it the vectors of the reflections 1 - tau v v^T (v's one left out); taus
    [..., min(M, N)]. Signs as LAPACK has them."""
    batch, *sizes = a.shape
    if not a.type.elems:
        return a, b.full(TensorType(F32, (batch, min(sizes))), 0)
    whole, taus = _factor(b, a)
    return whole, b.reshape(taus, taus.shape[:2])


def _factor(b: Builder, a: Value) -> tuple[Value, Value]:
    """The first columns one after the other; what is right of them is reflected by all of theirs at once."""
    batch, m, n = a.shape
    width = min(m, n, BLOCK)
    zeros = b.full(TensorType(F32, (batch, width, 1)), 0)
    panel, taus = repeat(b, _reflect_column, width, (piece(b, a, (0, m), (0, width)), zeros))
    if width == n:
        return panel, taus
    vectors = _vectors(b, panel)
    inner = transposed(b, _together(b, vectors, taus))
    right = _reflected(b, vectors, inner, piece(b, a, (0, m), (width, n)))
    if width == m:
        return b.concatenate((panel, right), 2), taus
    rest, later = _factor(b, piece(b, right, (width, m), (0, n - width)))
    top, bottom = (piece(b, panel, cut, (0, width)) for cut in ((0, width), (width, m)))
    return assembled(b, ((top, piece(b, right, (0, width), (0, n - width))), (bottom, rest))), b.concatenate((taus, later), 1)


def _reflect_column(b: Builder, j: Value, a: Value, taus: Value) -> tuple[Value, Value]:
    """Column j below the diagonal becomes zero; the columns right of it are reflected with it."""
    old = column(b, a, j)
    at, here = place(b, old, 1), spread(b, j, old)
    alpha = row(b, old, j)
    below = b.select(b.gt(at, here), old, 0)
    rest = total(b, b.mul(below, below), 1)
    norm = b.sqrt(b.add(b.mul(alpha, alpha), rest))
    nothing = b.eq(rest, 0)
    beta = b.select(nothing, alpha, b.select(b.lt(alpha, 0), norm, b.neg(norm)))
    tau = b.select(nothing, 0, b.div(b.sub(beta, alpha), beta))
    scale = b.select(nothing, 1, b.sub(alpha, beta))
    vector = b.select(b.eq(at, here), 1, b.div(below, spread(b, scale, below)))
    along = b.mul(total(b, b.mul(a, spread(b, vector, a)), 1), spread(b, tau, row(b, a, j)))
    less = b.sub(a, b.mul(spread(b, vector, a), spread(b, along, a)))
    a = b.select(b.gt(place(b, a, 2), spread(b, j, a)), less, a)
    new = b.select(b.lt(at, here), old, b.select(b.eq(at, here), spread(b, beta, old), vector))
    return with_column(b, a, new, j), with_row(b, taus, tau, j)


def _vectors(b: Builder, panel: Value) -> Value:
    """The reflections' vectors [B, M, K], with their ones, out of what is below a diagonal."""
    return b.add(triangle(b, panel, lower=True, diagonal=-1), identity(b, *panel.shape))


def _together(b: Builder, vectors: Value, taus: Value) -> Value:
    """T [B, K, K] with H_1 ... H_K = 1 - V T V^T."""
    width = vectors.shape[2]

    def step(b: Builder, j: Value, products: Value, taus: Value, inner: Value) -> tuple[Value]:
        met, tau = column(b, products, j), row(b, taus, j)
        at, here = place(b, met, 1), spread(b, j, met)
        met = b.select(b.lt(at, here), met, 0)
        added = b.mul(total(b, b.mul(inner, spread(b, transposed(b, met), inner)), 2), spread(b, b.neg(tau), met))
        return (with_column(b, inner, b.select(b.eq(at, here), spread(b, tau, met), added), j),)

    start = b.full(TensorType(F32, (vectors.shape[0], width, width)), 0)
    return repeat(b, step, width, (start,), (product(b, transposed(b, vectors), vectors), taus))[0]


def _reflected(b: Builder, vectors: Value, inner: Value, x: Value) -> Value:
    """(1 - V inner V^T) x."""
    return b.sub(x, product(b, vectors, product(b, inner, product(b, transposed(b, vectors), x))))


@batched(2, 1)
def householder_product(b: Builder, a: Value, taus: Value) -> Value:
    """The first N columns of H_1 ... H_K, whose vectors are below the diagonal of a [..., M, N]; taus: [..., K]."""
    batch, m, n = a.shape
    count = taus.shape[1]
    result = identity(b, batch, m, n)
    taus = b.reshape(taus, (batch, count, 1))
    for first in reversed(range(0, count, BLOCK)):
        last = min(first + BLOCK, count)
        vectors = _vectors(b, piece(b, a, (first, m), (first, last)))
        inner = _together(b, vectors, piece(b, taus, (first, last), (0, 1)))
        lower = _reflected(b, vectors, inner, piece(b, result, (first, m), (0, n)))
        result = b.concatenate((piece(b, result, (0, first), (0, n)), lower), 1)
    return result
