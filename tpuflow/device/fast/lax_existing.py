"""Products of operands that do not have elements everywhere: no zero that pads an operand makes a NaN of an infinity or NaN that it meets.

Where all is finite such a zero adds nothing, so the product is computed as if it were a factor, by whatever is quickest. If one may have
met an infinity or NaN, those are left out, and what they make of the sums is found by a product of ones for every way in which two
factors make an infinity or NaN: a loop, without trips until then, and of one product, since XLA compiles it for every shape.
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
Exists = Callable[[], Value]
"""Gives pred of an operand's rank, axes of size 1 repeated: where it has elements."""

_MAGNITUDE = np.int32(0x7FFFFFFF)
_LEAST_BITS = (0, 0x00800000, 0x7F800000, 0x7F800001, 0x80000000)
"""The bits of the least magnitude of each size of `isa.bounds` in f32, and one beyond the last."""


def _row(wanted: bounds.Factors) -> tuple[int, int, int, int]:
    """(kept bits, turned bits, least, most): a factor is wanted if its bits, so changed, lie between the two."""
    kept, turned = {0: (0x7FFFFFFF, 0), 1: (-1, 0), -1: (-1, -(2**31))}[wanted.sign]
    return kept, turned, _LEAST_BITS[wanted.least], _LEAST_BITS[wanted.most + 1] - 1


_OF_A, _OF_B = (np.array([_row(f) for f in column], np.int32) for column in zip(*((m.a, m.b) for m in bounds.MEETINGS), strict=True))
_PRODUCTS = np.array([m.product for m in bounds.MEETINGS], np.float32)


def among_existing(
    rounding: Rounding, multiply: Multiply, a: Value, b: Value, exist: tuple[Exists | None, Exists | None], dtype: DType
) -> Value:
    """multiply(a, b), a product of operands of `dtype` in f32, without the products of zeros that do not exist (None: all do)."""
    product = multiply(a, b)
    if not dtype.is_float or exist == (None, None):
        return product
    met = _met(a, b, product, exist, dtype)

    def mend(state: tuple[Value, Value, Value]) -> tuple[Value, Value, Value]:
        _, trip, sums = state
        x, y, trip = lax.optimization_barrier((a, b, trip))  # what needs nothing of the state would be made before the loop, needed or not
        mended = _mended(rounding, multiply, x, y, exist, dtype, trip, sums)
        return lax.lt(trip, np.int32(len(_PRODUCTS))), trip + np.int32(1), mended

    return lax.while_loop(lambda state: state[0], mend, (met, np.int32(0), product))[2]  # not a branch: the product stays where it is


def _met(a: Value, b: Value, product: Value, exist: tuple[Exists | None, Exists | None], dtype: DType) -> Value:
    """Whether a zero that pads an operand may have met an infinity or NaN; a pred.

    What it meets is of the other operand, and makes every sum that it is in infinite or NaN: whichever is the smaller is asked.
    """
    others = [(other, dtype) for other, there in ((b, exist[0]), (a, exist[1])) if there is not None]
    asked = others if sum(x.size for x, _ in others) <= product.size else [(product, F32)]
    return functools.reduce(lax.bitwise_or, [_any_not_finite(x, kind) for x, kind in asked])


def _mended(
    rounding: Rounding, multiply: Multiply, a: Value, b: Value, exist: tuple[Exists | None, Exists | None], dtype: DType, trip: Value,
    sums: Value,
) -> Value:  # fmt: skip
    """One trip towards the product where such zeros met infinities or NaN; sums: what the trips before have made, of the first any.

    For each meeting a trip, after which sums of products that are not finite are as they will be, all others zero: these are the sums of
    finite products, which the last trip makes.
    """
    last = lax.eq(trip, np.int32(len(_PRODUCTS)))
    factors = [_factors(x, there, of, trip, last, dtype) for x, there, of in zip((a, b), exist, (_OF_A, _OF_B), strict=True)]
    found = multiply(*factors)
    met = lax.full_like(found, _entry(_PRODUCTS, trip))
    nothing, nan = rounding.full(found.shape, 0.0, F32), rounding.full(found.shape, np.nan, F32)
    sums = lax.select(lax.full_like(found, lax.eq(trip, np.int32(0)), np.bool_), nothing, sums)
    is_zero = lax.eq(sums, nothing)
    new = lax.select(is_zero | lax.eq(sums, met), met, nan)
    unfinished = lax.full_like(found, lax.bitwise_not(last), np.bool_)
    return lax.select(lax.select(unfinished, found > nothing, is_zero), lax.select(unfinished, new, found), sums)


def _factors(x: Value, exists: Exists | None, wanted: np.ndarray, trip: Value, last: Value, dtype: DType) -> Value:
    """Ones where an operand is as the meeting of a trip says, else zeros; its finite numbers in the last trip."""
    ones = lax.convert_element_type(_are(x, exists, _entry(wanted, trip), dtype), x.dtype)
    return lax.select(lax.full_like(x, last, np.bool_), _finite(x), ones)


def _entry(table: np.ndarray, trip: Value) -> Value:
    """Of a table with an entry for each meeting that of a trip, in the last trip any."""
    return lax.dynamic_index_in_dim(jnp.asarray(table), trip, keepdims=False, allow_negative_indices=False)


def _finite(x: Value) -> Value:
    """Zeros for infinities and NaN: where these take part in a product at all, it is found otherwise."""
    return lax.select(lax.is_finite(x), x, jnp.zeros_like(x))


def _any_not_finite(x: Value, dtype: DType) -> Value:
    """Whether any number is infinite or NaN: only then do products with zeros add up to NaN.

    Of ways to ask a whole array for one pred the quickest, to run and to compile: XLA has products of matrices (two rows make one) ready,
    and a reduction takes it three kernels.
    """
    width = x.shape[-1] if x.ndim else 1
    rows = lax.reshape(widen(x, dtype), (math.prod(x.shape[:-1]), width))
    sums = lax.dot(jnp.zeros((2, rows.shape[0]), jnp.float32), rows)
    total = lax.dot(sums, jnp.zeros((width, 2), jnp.float32))[0, 0]
    return lax.ne(total, total)


def _are(x: Value, exists: Exists | None, fields: Value, dtype: DType) -> Value:
    """pred: where x exists and is as a row of `_OF_A` or `_OF_B` says."""
    bits = lax.bitcast_convert_type(widen(x, dtype), jnp.int32)
    kept, turned, least, most = (lax.full_like(bits, lax.squeeze(lax.slice_in_dim(fields, i, i + 1), (0,))) for i in range(4))
    changed = (bits & kept) ^ turned
    here = (changed >= least) & (changed <= most)
    return here if exists is None else here & (exists() | (bits & _MAGNITUDE >= _LEAST_BITS[bounds.FINITE]))
