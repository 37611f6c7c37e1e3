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


def matmul(
    a: Array, b: Array, contraction: Contraction, dtype: DType, acc: DType, a_mask: Array | None = None, b_mask: Array | None = None
) -> Array:
    """See `Arithmetic.matmul`."""
    left, right, back = _matrices(contraction, a.shape, b.shape)
    if not dtype.is_float:
        return back(_modular(left(a), right(b), acc))
    factors = widen(left(a), dtype), widen(right(b), dtype)
    masked = _padding_matters(factors[1], a_mask) or _padding_matters(factors[0], b_mask)
    masks = _expanded(a_mask, a, left), _expanded(b_mask, b, right)
    return back(_masked_product(*factors, *masks) if masked else _ordered(*factors))


def unordered_matmul(a: Array, b: Array, contraction: Contraction) -> Array:
    """The product of f32 operands, its sums in BLAS' order."""
    left, right, back = _matrices(contraction, a.shape, b.shape)
    return back(np.matmul(left(a), right(b)))


def _matrices(
    contraction: Contraction, a_shape: Sequence[int], b_shape: Sequence[int]
) -> tuple[Callable[[Array], Array], Callable[[Array], Array], Callable[[Array], Array]]:
    """(an array of a's shape as matrices [B, M, K], one of b's as [B, K, N], matrices [B, M, N] with the axes of the product)."""
    batch, rows, columns, contracted = contraction.roles
    sizes, order = contraction.by_label(a_shape, b_shape), (*batch, *rows, *columns)
    return (
        lambda x: _arranged(x, contraction.lhs, (batch, rows, contracted), sizes),
        lambda x: _arranged(x, contraction.rhs, (batch, contracted, columns), sizes),
        lambda x: x.reshape([sizes[label] for label in order]).transpose([order.index(label) for label in contraction.out]),
    )


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


def _masked_product(a: Array, b: Array, a_mask: Array | None, b_mask: Array | None) -> Array:
    """The product without the zeros of the padding: of the finite factors, then the sums that infinities and NaN make infinite or NaN."""
    return with_non_finite(_ordered(finite(a), finite(b)), non_finite_sums(a, b, a_mask, b_mask, np.matmul))


def finite(x: Array) -> Array:
    """Zeros in place of infinities and NaN."""
    return np.where(np.isfinite(x), x, x.dtype.type(0))


def with_non_finite(product: Array, sums: Array | float) -> Array:
    """The product of the finite factors, but where there are other products, what these add up to."""
    return np.where(sums == 0, product, canonical(np.asarray(sums, np.float32)))


def non_finite_sums(
    a: Array, b: Array, a_mask: Array | None, b_mask: Array | None, multiply: Callable[[Array, Array], Array]
) -> Array | float:
    """What the products of f32 factors that are infinite or NaN add up to in each sum; 0 where there is none.

    multiply: of two arrays of 0 and 1 in f32, those of a's shape and b's.
    """
    left, right = _kinds(a, a_mask), _kinds(b, b_mask)
    there = [np.bincount(kinds.reshape(-1), minlength=_KINDS) > 0 for kinds in (left, right)]
    sums: Array | float = 0.0
    for row in NON_FINITE_PRODUCTS:
        of_a, of_b = _wanted(row.a), _wanted(row.b)
        if (there[0] & of_a).any() and (there[1] & of_b).any():
            found = multiply(of_a.astype(np.float32)[left], of_b.astype(np.float32)[right]) > 0
            sums = np.where(found, sums + np.float32(row.product), sums)
    return sums


_CLASSES = (ZERO, FINITE, INFINITE, NAN)
_KINDS = 1 + 3 * len(_CLASSES)
"""How many kinds of factors there are: zeros of the padding, and for each class those without a sign, positive and negative ones."""


def _kinds(x: Array, mask: Array | None) -> Array:
    """The kind of every factor: 0 for a zero of the padding, else 1 + 3 class + (0, 1 or 2 for no sign, plus or minus)."""
    classes = np.select([np.isnan(x), np.isinf(x), x != 0], [np.uint8(NAN), np.uint8(INFINITE), np.uint8(FINITE)], np.uint8(ZERO))
    kinds = 3 * classes + np.where(x > 0, np.uint8(2), np.where(x < 0, np.uint8(3), np.uint8(1)))
    return kinds if mask is None else np.where((x != 0) | mask, kinds, np.uint8(0))


def _wanted(wanted: ClassRange) -> Array:
    """For every kind, whether it is of the wanted classes and sign."""
    signs = {0: (0, 1, 2), 1: (1,), -1: (2,)}[wanted.sign]
    kinds = [1 + 3 * of + sign for of in range(wanted.least, wanted.most + 1) for sign in signs]
    return np.isin(np.arange(_KINDS), kinds)


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
