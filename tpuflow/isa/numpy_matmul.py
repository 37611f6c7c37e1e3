"""The matrix unit's sum in NumPy: float64, ascending, rounded once; at BLAS speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tpuflow.dtypes import F32, DType
from tpuflow.isa.bounds import FINITE, INFINITE, NAN, NON_FINITE_PRODUCTS, ZERO, ClassRange
from tpuflow.isa.contraction import Contraction
from tpuflow.isa.numpy_rounding import Array, canonical, narrow, widen

# Twice the unit roundoff of float64, and a little for the bound's own rounding: two sums of K products differ by at most
# SLACK * (K - 1) * sum|a b|, in whatever order each was added.
SLACK = 2.1 * 2.0**-53
_PRODUCTS_AT_ONCE = 1 << 22

Multiply = Callable[[Array, Array], Array]
"""f32 [B, M, K], f32 [B, K, N] -> f32 [B, M, N]."""


def matmul(
    a: Array, b: Array, contraction: Contraction, dtype: DType, acc: DType, a_mask: Array | None = None, b_mask: Array | None = None,
    multiply: Multiply | None = None,
) -> Array:  # fmt: skip
    """See `Arithmetic.matmul`; multiply: of finite floats, instead of the matrix unit's own."""
    batch, rows, columns, contracted = contraction.roles
    sizes = contraction.by_label(a.shape, b.shape)

    def left(x: Array) -> Array:
        return _arranged(x, contraction.lhs, (batch, rows, contracted), sizes)  # [B, M, K]

    def right(x: Array) -> Array:
        return _arranged(x, contraction.rhs, (batch, contracted, columns), sizes)  # [B, K, N]

    if dtype.is_float:
        factors = widen(left(a), dtype), widen(right(b), dtype)
        masked = _padding_matters(factors[1], a_mask) or _padding_matters(factors[0], b_mask)
        masks = _expanded(a_mask, a, left), _expanded(b_mask, b, right)
        product = _masked_product(*factors, *masks, multiply or _ordered) if masked else (multiply or _ordered)(*factors)
    else:
        product = _modular(left(a), right(b), acc)
    order = (*batch, *rows, *columns)
    return product.reshape([sizes[x] for x in order]).transpose([order.index(x) for x in contraction.out])


def patches(a: Array, axis: int, outer: int, inner: int, stride: int, dilation: int) -> Array:
    """See `Arithmetic.patches`; a read-only view."""
    if 0 in (outer, inner):
        return np.empty((*a.shape[:axis], outer, inner, *a.shape[axis + 1 :]), a.dtype)
    if (outer - 1) * stride + (inner - 1) * dilation >= a.shape[axis]:
        raise ValueError(f"{outer} x {inner} positions in strides of {stride} and {dilation} reach beyond an axis of {a.shape[axis]}")
    step = a.strides[axis]
    shape, strides = (*a.shape[:axis], outer, inner, *a.shape[axis + 1 :]), (step * stride, step * dilation)
    return np.lib.stride_tricks.as_strided(a, shape, (*a.strides[:axis], *strides, *a.strides[axis + 1 :]), writeable=False)


def _expanded(mask: Array | None, operand: Array, arrange: Callable[[Array], Array]) -> Array | None:
    return None if mask is None else arrange(np.broadcast_to(mask, operand.shape))


def _padding_matters(other: Array, mask: Array | None) -> bool:
    """Whether an operand with this mask has padding, and the other operand an infinity or NaN that makes NaN of a zero there."""
    return mask is not None and not mask.all() and not np.isfinite(other).all()


def _masked_product(a: Array, b: Array, a_mask: Array | None, b_mask: Array | None, multiply: Multiply) -> Array:
    """The product without the zeros of the padding: of the finite factors, then the sums that infinities and NaN make infinite or NaN."""
    product = multiply(np.where(np.isfinite(a), a, 0), np.where(np.isfinite(b), b, 0))
    left, right = _classes(a, a_mask), _classes(b, b_mask)
    non_finite = np.zeros(product.shape, np.float32)
    for row in NON_FINITE_PRODUCTS:
        of_a, of_b = _indicator(row.a, a, left), _indicator(row.b, b, right)
        if of_a.any() and of_b.any():
            non_finite = np.where(np.matmul(of_a, of_b) > 0, non_finite + np.float32(row.product), non_finite)
    return np.where(non_finite == 0, product, canonical(non_finite))


def _classes(x: Array, mask: Array | None) -> Array:
    """The class of every factor: ZERO, FINITE, INFINITE or NAN; -1 for a zero of the padding."""
    zero = ZERO if mask is None else np.where(mask, ZERO, -1)
    return np.where(x == 0, zero, np.select([np.isnan(x), np.isinf(x)], [NAN, INFINITE], FINITE))


def _indicator(wanted: ClassRange, x: Array, classes: Array) -> Array:
    """1.0 for factors of the wanted classes and sign, else 0.0."""
    here = (classes >= wanted.least) & (classes <= wanted.most)
    return (here & (np.sign(x) == wanted.sign) if wanted.sign else here).astype(np.float32)


def _arranged(x: Array, axes: Sequence[int], groups: Sequence[tuple[int, ...]], sizes: dict[int, int]) -> Array:
    """x with its axes brought into three groups, each flattened to one axis."""
    order = [tuple(axes).index(label) for group in groups for label in group]
    return x.transpose(order).reshape([int(np.prod([sizes[label] for label in group], dtype=int)) for group in groups])


def _modular(a: Array, b: Array, acc: DType) -> Array:
    narrow_enough = a.itemsize <= 2 and a.shape[-1] < 1 << 20  # |sum| < 2^52: exact in float64, so BLAS may add in any order
    wide = np.dtype(np.float64 if narrow_enough else np.int64)
    return np.matmul(a.astype(wide), b.astype(wide)).astype(np.int64).astype(acc.numpy)


def _ordered(a: Array, b: Array) -> Array:
    """f32 [B, M, K] x [B, K, N] -> f32 [B, M, N], the float64 sums taken in ascending k.

    Products of two f32 are exact in float64, and any two orders of adding K terms differ by at most 2 (K - 1) u sum|a b|. BLAS adds in
    its own order; where its result is so close to a rounding boundary of f32 that the order could matter, the sum is done again, in
    ascending order.
    """
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    sums = np.matmul(wide_a, wide_b) + 0.0
    k = a.shape[-1]
    slack = (SLACK * max(k - 1, 0)) * np.matmul(np.abs(wide_a), np.abs(wide_b))
    low, high = narrow(sums - slack, F32), narrow(sums + slack, F32)
    doubtful = (low.view(np.uint32) != high.view(np.uint32)) & np.isfinite(sums)
    result = narrow(sums, F32)
    if doubtful.any():
        result[doubtful] = narrow(_ascending(wide_a, wide_b, np.nonzero(doubtful)), F32)
    return result


def _ascending(a: Array, b: Array, where: tuple[Array, ...]) -> Array:
    """float64 sums at the given (batch, row, column) places, each term added in turn."""
    batch, row, column = where
    sums = np.empty(len(row))
    step = max(_PRODUCTS_AT_ONCE // a.shape[-1], 1)
    for i in range(0, len(row), step):
        part = slice(i, i + step)
        terms = a[batch[part], row[part], :] * b[batch[part], :, column[part]]
        sums[part] = np.add.accumulate(terms, axis=1)[:, -1]
    return sums + 0.0
