"""Products of operands that do not have elements everywhere: no zero that pads an operand makes a NaN of an infinity or NaN that it meets.

Where all is finite such a zero adds nothing, so the product is computed as if it were a factor, by whatever is quickest. If one may have
met an infinity or NaN, those are left out, and what they make of the sums is found by a product of ones for every way in which two
factors make an infinity or NaN: a loop, without trips until then.
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
_INFINITE, _MINUS_INFINITE, _NAN = 1, 2, 4
_FLAGS = np.array([_NAN if m.product != m.product else _INFINITE if m.product > 0 else _MINUS_INFINITE for m in bounds.MEETINGS], np.int8)
"""What a sum contains if it contains a product of the meeting."""


def among_existing(
    rounding: Rounding, multiply: Multiply, count: Multiply, a: Value, b: Value, exist: tuple[Exists | None, Exists | None], dtype: DType
) -> Value:
    """multiply(a, b), a product of operands of `dtype` in f32, without the products of zeros that do not exist (None: all do).

    count: the same of operands in f32 that are zeros and ones, right in whether a sum is zero.
    """
    product = multiply(a, b)
    if not dtype.is_float or exist == (None, None):
        return product
    met = _met(a, b, product, exist, dtype)

    def mend(state: tuple[Value, Value]) -> tuple[Value, Value]:
        x, y = lax.optimization_barrier((a, b))  # or what needs nothing of the state would be made before the loop, needed or not
        return jnp.zeros_like(met), _mended(rounding, multiply, count, x, y, exist, dtype)

    return lax.while_loop(lambda state: state[0], mend, (met, product))[1]  # not a branch: the product stays where it is


def _met(a: Value, b: Value, product: Value, exist: tuple[Exists | None, Exists | None], dtype: DType) -> Value:
    """Whether a zero that pads an operand may have met an infinity or NaN; a pred.

    What it meets is of the other operand, and makes every sum that it is in infinite or NaN: whichever is the smaller is asked.
    """
    others = [(other, dtype) for other, there in ((b, exist[0]), (a, exist[1])) if there is not None]
    asked = others if sum(x.size for x, _ in others) <= product.size else [(product, F32)]
    return functools.reduce(lax.bitwise_or, [_any_not_finite(x, kind) for x, kind in asked])


def _mended(
    rounding: Rounding, multiply: Multiply, count: Multiply, a: Value, b: Value, exist: tuple[Exists | None, Exists | None], dtype: DType
) -> Value:
    """The product where such zeros met infinities or NaN."""
    a_exists, b_exists = exist
    product = multiply(a if b_exists is None else _finite(a), b if a_exists is None else _finite(b))

    def trip(n: Value, flags: Value) -> Value:
        found = count(_ones(a, a_exists, _OF_A, n, dtype), _ones(b, b_exists, _OF_B, n, dtype))
        flag = lax.dynamic_index_in_dim(jnp.asarray(_FLAGS), n, keepdims=False)
        return flags | lax.select(found > 0, lax.full_like(flags, flag), jnp.zeros_like(flags))

    flags = lax.fori_loop(0, len(_FLAGS), trip, jnp.zeros(product.shape, jnp.int8))
    return _with(rounding, product, flags)


def _with(rounding: Rounding, product: Value, flags: Value) -> Value:
    """The sums of the finite products and of what else is in them."""
    result = rounding.full(product.shape, np.nan, F32)
    for contained, value in ((_INFINITE, np.inf), (_MINUS_INFINITE, -np.inf)):
        result = lax.select(flags == contained, rounding.full(product.shape, value, F32), result)
    return lax.select(flags == 0, product, result)


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


def _ones(x: Value, exists: Exists | None, wanted: np.ndarray, row: Value, dtype: DType) -> Value:
    """f32: 1 where x is as row `row` of `wanted` says, else 0."""
    bits = lax.bitcast_convert_type(widen(x, dtype), jnp.int32)
    fields = lax.dynamic_index_in_dim(jnp.asarray(wanted), row, keepdims=False)
    kept, turned, least, most = (lax.full_like(bits, lax.squeeze(lax.slice_in_dim(fields, i, i + 1), (0,))) for i in range(4))
    changed = (bits & kept) ^ turned
    here = (changed >= least) & (changed <= most)
    if exists is not None:
        here = here & (exists() | (bits & _MAGNITUDE >= _LEAST_BITS[bounds.FINITE]))
    return lax.convert_element_type(here, jnp.float32)
