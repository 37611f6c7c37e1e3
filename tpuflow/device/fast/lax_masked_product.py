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

from tpuflow.device.fast.lax_rounding import Rounding, materialized, widen
from tpuflow.dtypes import F32, DType
from tpuflow.isa import bounds

Value = Any
Multiply = Callable[[Value, Value], Value]
Mask = Callable[[], Value]
"""() -> pred of an operand's rank, axes of size 1 broadcast: true where it has elements, false in its padding."""

_MAGNITUDE, _ONE = np.int32(0x7FFFFFFF), 0x3F800000
_LEAST_BITS = (0, 0x00800000, 0x7F800000, 0x7F800001, 0x80000000)
"""The f32 bits of the least magnitude of each floating-point class of `isa.bounds`, and one beyond the last."""


def _row(wanted: bounds.ClassRange, *, as_one: bool) -> tuple[int, ...]:
    """(bits to keep, bits to flip, least, most, own bits, other bits): a factor is of the wanted classes if its bits, changed by the first
    two, are from least to most; it is then multiplied as 1 or as itself, which are the number's own bits and others."""
    kept, flipped = {0: (0x7FFFFFFF, 0), 1: (-1, 0), -1: (-1, -(2**31))}[wanted.sign]
    factor = (0, _ONE) if as_one else (-1, 0)
    return kept, flipped, _LEAST_BITS[wanted.least], _LEAST_BITS[wanted.most + 1] - 1, *factor


_IS_FINITE = _row(bounds.ClassRange(bounds.ZERO, bounds.FINITE, 0), as_one=False)
_OF_A, _OF_B = (
    np.array([*(_row(getattr(row, side), as_one=True) for row in bounds.NON_FINITE_PRODUCTS), _IS_FINITE], np.int32) for side in ("a", "b")
)
_PRODUCTS = np.array([*(row.product for row in bounds.NON_FINITE_PRODUCTS), 0], np.float32)
_LIMITS = np.array([*(0 for _ in bounds.NON_FINITE_PRODUCTS), np.inf], np.float32)
_SUMS_KEPT = np.array([0, *(-1 for _ in bounds.NON_FINITE_PRODUCTS)], np.int32)
"""Tables with an entry for each trip of a correction: factors, and what to do with the sums. Trips differ in numbers alone: for a condition
that is the same for all elements LLVM compiles a loop twice."""


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
        return lax.lt(trip, np.int32(len(_PRODUCTS) - 1)), trip + np.int32(1), corrected

    state = needed, np.int32(0), product
    return lax.while_loop(lambda state: state[0], correct, state)[2]  # not a `cond`, so that the product is updated in place


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
    x, y = (_factors(rounding, x, mask, _entry(rows, trip), dtype) for x, mask, rows in zip((a, b), masks, (_OF_A, _OF_B), strict=True))
    found = multiply(x, y)
    value, limit, kept = (lax.broadcast(_entry(table, trip), found.shape) for table in (_PRODUCTS, _LIMITS, _SUMS_KEPT))
    sums = lax.bitcast_convert_type(lax.bitcast_convert_type(sums, jnp.int32) & kept, jnp.float32)
    nothing, is_there = rounding.full(found.shape, 0.0, F32), found > limit
    added = rounding.canonical(sums + lax.select(is_there, value, nothing))
    return lax.select(lax.eq(sums, nothing), lax.select(is_there, value, found), added)


def _factors(rounding: Rounding, x: Value, mask: Mask | None, row: Value, dtype: DType) -> Value:
    """An operand as a trip multiplies it, by its row of `_OF_A` or `_OF_B`: zero where it is not of the wanted classes."""
    bits = lax.bitcast_convert_type(widen(x, dtype), jnp.int32)
    kept, flipped, least, most, own, other = (lax.broadcast(lax.index_in_dim(row, i, keepdims=False), bits.shape) for i in range(row.size))
    changed = (bits & kept) ^ flipped
    here = (changed >= least) & (changed <= most)
    if mask is not None:
        here &= mask() | (bits & _MAGNITUDE >= _LEAST_BITS[bounds.FINITE])
    factor = lax.bitcast_convert_type(lax.select(here, (bits & own) | other, jnp.zeros_like(bits)), jnp.float32)
    return materialized(rounding.representable(factor, dtype))


def _entry(table: np.ndarray, trip: Value) -> Value:
    """The entry of a trip in a table."""
    return materialized(lax.dynamic_index_in_dim(jnp.asarray(table), trip, keepdims=False, allow_negative_indices=False))


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
