"""Products of padded operands: the zeros of the padding take part in no product, so 0 * infinity or 0 * NaN there makes no NaN.

Where everything is finite a zero adds nothing, so the product is computed as if the padding were elements, in the quickest form. If a zero
of the padding may have met an infinity or NaN, the product is computed again without those two, of finite factors, and the sums that must
be infinite or NaN are found by one product of 0/1 indicators for each row of `isa.bounds.NON_FINITE_PRODUCTS`. This is a loop that runs no
trip in the first case; its body is a single product, since XLA compiles that for every shape.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.device.fast.lax_rounding import Rounding, widen
from tpuflow.dtypes import F32, DType
from tpuflow.isa import bounds

Value = Any
Multiply = Callable[[Value, Value], Value]
Mask = Callable[[], Value]
"""() -> pred of an operand's rank, axes of size 1 broadcast: true where it has elements, false in its padding."""

_MAGNITUDE = np.int32(0x7FFFFFFF)
_LEAST_BITS = (0, 0x00800000, 0x7F800000, 0x7F800001, 0x80000000)
"""The f32 bits of the least magnitude of each floating-point class of `isa.bounds`, and one beyond the last."""


def _row(wanted: bounds.ClassRange) -> tuple[int, int, int, int]:
    """(bits to keep, bits to flip, least, most): a factor is of the wanted classes if its bits, so changed, are from least to most."""
    kept, flipped = {0: (0x7FFFFFFF, 0), 1: (-1, 0), -1: (-1, -(2**31))}[wanted.sign]
    return kept, flipped, _LEAST_BITS[wanted.least], _LEAST_BITS[wanted.most + 1] - 1


_OF_A, _OF_B = (np.array([_row(getattr(row, side)) for row in bounds.NON_FINITE_PRODUCTS], np.int32) for side in ("a", "b"))
_PRODUCTS = np.array([row.product for row in bounds.NON_FINITE_PRODUCTS], np.float32)


def masked_product(
    rounding: Rounding, multiply: Multiply, a: Value, b: Value, masks: tuple[Mask | None, Mask | None], dtype: DType
) -> Value:
    """multiply(a, b), in f32, of operands of `dtype`, without the products of the padding; masks: of a and of b (None: no padding)."""
    product = multiply(a, b)
    if not dtype.is_float or masks == (None, None):
        return product
    needed = _may_meet_non_finite(a, b, product, masks, dtype)

    def correct(state: tuple[Value, Value, Value]) -> tuple[Value, Value, Value]:
        _, trip, sums = state
        x, y, trip = lax.optimization_barrier((a, b, trip))  # else XLA hoists what is loop-invariant, and computes it always
        corrected = _corrected(rounding, multiply, x, y, masks, dtype, trip, sums)
        return lax.lt(trip, np.int32(len(_PRODUCTS))), trip + np.int32(1), corrected

    return lax.while_loop(lambda state: state[0], correct, (needed, np.int32(0), product))[
        2
    ]  # not a `cond`, so that the product is updated in place


def _may_meet_non_finite(a: Value, b: Value, product: Value, masks: tuple[Mask | None, Mask | None], dtype: DType) -> Value:
    """pred []: whether a zero of one operand's padding may have been multiplied by an infinity or NaN of the other operand.

    Such a factor makes every sum that it is in infinite or NaN, so either the other operand or the product tells: the smaller is tested.
    """
    others = [(other, dtype) for other, mask in ((b, masks[0]), (a, masks[1])) if mask is not None]
    tested = others if sum(x.size for x, _ in others) <= product.size else [(product, F32)]
    return functools.reduce(lax.bitwise_or, [_any_not_finite(x, kind) for x, kind in tested])


def _corrected(
    rounding: Rounding, multiply: Multiply, a: Value, b: Value, masks: tuple[Mask | None, Mask | None], dtype: DType, trip: Value,
    sums: Value,
) -> Value:  # fmt: skip
    """One trip of the correction; sums: the result of the trip before (ignored in the first trip).

    Each row of `NON_FINITE_PRODUCTS` has a trip. After these the sums with such products have their final value, an infinity or NaN, and
    all others are zero; the last trip fills these in with the product of the finite factors.
    """
    last = lax.eq(trip, np.int32(len(_PRODUCTS)))
    factors = [_factors(x, mask, rows, trip, last, dtype) for x, mask, rows in zip((a, b), masks, (_OF_A, _OF_B), strict=True)]
    found = multiply(*factors)
    value = lax.full_like(found, _entry(_PRODUCTS, trip))
    nothing, nan = rounding.full(found.shape, 0.0, F32), rounding.full(found.shape, np.nan, F32)
    sums = lax.select(lax.full_like(found, lax.eq(trip, np.int32(0)), np.bool_), nothing, sums)
    is_zero = lax.eq(sums, nothing)
    new = lax.select(is_zero | lax.eq(sums, value), value, nan)
    unfinished = lax.full_like(found, lax.bitwise_not(last), np.bool_)
    return lax.select(lax.select(unfinished, found > nothing, is_zero), lax.select(unfinished, new, found), sums)


def _factors(x: Value, mask: Mask | None, wanted: np.ndarray, trip: Value, last: Value, dtype: DType) -> Value:
    """An operand's indicator of the classes that a trip is about: 1 or 0. In the last trip its numbers, with zeros for non-finite ones."""
    ones = lax.convert_element_type(_in_classes(x, mask, _entry(wanted, trip), dtype), x.dtype)
    return lax.select(lax.full_like(x, last, np.bool_), _finite(x), ones)


def _entry(table: np.ndarray, trip: Value) -> Value:
    """The entry of a trip in a table with one for each row of `NON_FINITE_PRODUCTS`; in the last trip, which has none, any entry."""
    return lax.dynamic_index_in_dim(jnp.asarray(table), trip, keepdims=False, allow_negative_indices=False)


def _finite(x: Value) -> Value:
    """x with zeros in place of infinities and NaN, whose sums the trips before have found."""
    return lax.select(lax.is_finite(x), x, jnp.zeros_like(x))


def _any_not_finite(x: Value, dtype: DType) -> Value:
    """pred []: whether any number is infinite or NaN, tested by a product with zeros, which is NaN only then.

    That is the quickest test of a whole array, to run and to compile: XLA:CPU has matrix products ready (two rows of zeros make it one),
    while a reduction takes it three kernels.
    """
    width = x.shape[-1] if x.ndim else 1
    rows = lax.reshape(widen(x, dtype), (math.prod(x.shape[:-1]), width))
    sums = lax.dot(jnp.zeros((2, rows.shape[0]), jnp.float32), rows)
    total = lax.dot(sums, jnp.zeros((width, 2), jnp.float32))[0, 0]
    return lax.ne(total, total)


def _in_classes(x: Value, mask: Mask | None, fields: Value, dtype: DType) -> Value:
    """pred of x's shape: whether it is an element of the classes that a row of `_OF_A` or `_OF_B` stands for."""
    bits = lax.bitcast_convert_type(widen(x, dtype), jnp.int32)
    kept, flipped, least, most = (lax.full_like(bits, lax.squeeze(lax.slice_in_dim(fields, i, i + 1), (0,))) for i in range(4))
    changed = (bits & kept) ^ flipped
    here = (changed >= least) & (changed <= most)
    return here if mask is None else here & (mask() | (bits & _MAGNITUDE >= _LEAST_BITS[bounds.FINITE]))
