"""Sorts in the forms that XLA:CPU is quick in: a single array of integers, or its TopK.

XLA:CPU sorts several arrays together, and floats, by calling a comparator for every pair: 70 ms for [256, 1024] and the positions of its
elements, instead of 11. So a 32-bit key and its position are packed into one 64-bit integer, and the other operands are gathered by the
sorted positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.device.fast.lax_rounding import flushed, turned, x64
from tpuflow.dtypes import DType

Value = Any

FEW = 8
"""TopK is quicker than a sort if `count` is at most 1 / FEW of a row."""
_SIGN = np.uint32(0x80000000)


def sort(operands: Sequence[Value], dtypes: Sequence[DType], axis: int, keys: int, count: int) -> tuple[Value, ...]:
    """See `Arithmetic.sort`."""
    ranks = [_rank(x, dtype) for x, dtype in zip(operands[:keys], dtypes, strict=False)]
    whole = len(operands) == 1 and not dtypes[0].is_float and not _are_few(count, operands[0].shape[axis])
    if keys > 1 or whole or not operands[0].size:
        together = operands if whole else (*ranks, *operands)
        sorted_ = lax.sort(tuple(together), dimension=axis, is_stable=True, num_keys=keys)[-len(operands) :]
        return tuple(lax.slice_in_dim(x, 0, count, axis=axis) for x in sorted_)
    places = _first_places(ranks[0], axis, count)
    return tuple(_taken(x, places, axis) for x in operands)


def _rank(x: Value, dtype: DType) -> Value:
    """s32 keys with the order of the values: subnormals (f32, bf16) and -0 equal to 0, NaN above all."""
    if dtype.is_float:
        wide = flushed(x, dtype)
        ordered = turned(lax.bitcast_convert_type(wide, jnp.int32))
        ordered = lax.select(lax.eq(wide, jnp.zeros_like(wide)), jnp.zeros_like(ordered), ordered)
        return lax.select(lax.ne(wide, wide), jnp.full_like(ordered, 0x7FC00000), ordered)
    if x.dtype == np.uint32:
        return lax.bitcast_convert_type(x ^ _SIGN, jnp.int32)
    return lax.convert_element_type(x, jnp.int32)


def _first_places(rank: Value, axis: int, count: int) -> Value:
    """The positions of the `count` least keys along `axis`, in order; equal keys keep their order."""
    last = rank.ndim - 1
    rows = jnp.moveaxis(rank, axis, last)
    find = _least if _are_few(count, rank.shape[axis]) else _in_order
    return jnp.moveaxis(find(rows, count), last, axis)


def _are_few(count: int, length: int) -> bool:
    return count * FEW <= length


def _in_order(rank: Value, count: int) -> Value:
    with x64():
        high = lax.shift_left(lax.convert_element_type(rank, np.int64), lax.full(rank.shape, 32, np.int64))
        numbered = lax.bitwise_or(high, lax.broadcasted_iota(np.int64, rank.shape, rank.ndim - 1))
        first = lax.slice_in_dim(lax.sort(numbered, is_stable=False), 0, count, axis=rank.ndim - 1)
        return lax.convert_element_type(first, np.int32)


def _least(rank: Value, count: int) -> Value:
    """The positions by XLA:CPU's TopK, which compares floats by their bits alone, so that any integers can be given to it as floats.

    It is a custom call by name, since XLA itself recognizes a TopK only where it has simplified a comparator first.
    """
    *outer, n = rank.shape
    floats = lax.bitcast_convert_type(turned(lax.bitwise_not(rank)), jnp.float32)
    shape = (math.prod(outer), count)
    results = jax.ShapeDtypeStruct(shape, np.float32), jax.ShapeDtypeStruct(shape, np.int32)
    found = jax.ffi.ffi_call("TopK", results, vmap_method="sequential", custom_call_api_version=1)(floats.reshape(-1, n))
    return found[1].reshape(*outer, count)


def _taken(x: Value, places: Value, axis: int) -> Value:
    return jnp.take_along_axis(x, places, axis, mode="promise_in_bounds")
