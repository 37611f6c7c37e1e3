"""Operations with batching rules of their own: `vmap` would turn them into operations that are slow on XLA:CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from tpuflow.device.fast.slices import dynamic_index_in_dim

Value = Any


def convolution(lhs: Value, rhs: Value, *arguments: Any, **options: Any) -> Value:
    """`lax.conv_general_dilated`. If both operands have lanes, as for the gradients of kernels on several chips, `vmap` would make the
    lanes feature groups, which take XLA:CPU several times as long; here it is a loop over lanes."""

    def plain(lhs: Value, rhs: Value) -> Value:
        return lax.conv_general_dilated(lhs, rhs, *arguments, **options)

    convolve = custom_vmap(plain)

    @convolve.def_vmap
    def _(axis_size: int, batched: tuple[bool, bool], lhs: Value, rhs: Value) -> tuple[Value, bool]:
        if all(batched):
            return lax.map(lambda pair: convolution(*pair, *arguments, **options), (lhs, rhs)), True
        return jax.vmap(plain, tuple(0 if b else None for b in batched))(lhs, rhs), True

    return convolve(lhs, rhs)


def picked(items: Value, number: Value, axis: int = 0) -> Value:
    """items[number] along an axis, without the gather of `vmap` if the items alone have lanes: XLA:CPU makes copies for it."""
    return _picking(axis, _each_picked)(items, number)


def of_lane(rows: Value, lane: Value, axis: int = 0) -> Value:
    """rows[lane] along an axis, where `lane` is the `lax.axis_index` of a `vmap` with one lane for each row: the rows themselves become the
    lanes, without a copy."""
    return _picking(axis, lambda rows, lanes, axis: jnp.moveaxis(rows, axis, 0))(rows, lane)


def _picking(axis: int, shared: Callable[[Value, Value, int], Value]) -> Callable[[Value, Value], Value]:
    """items[number] along an axis; shared(items, numbers, axis): the result for items without lanes and one number for each lane."""
    pick = custom_vmap(_item(axis))

    @pick.def_vmap
    def _(axis_size: int, batched: tuple[bool, bool], items: Value, number: Value) -> tuple[Value, bool]:
        if not batched[1]:
            return _picking(axis + 1, shared)(items, number), True
        return jax.vmap(_item(axis))(items, number) if batched[0] else shared(items, number, axis), True

    return pick


def _each_picked(items: Value, numbers: Value, axis: int) -> Value:
    return jax.vmap(_item(axis), (None, 0))(items, numbers)


def _item(axis: int) -> Callable[[Value, Value], Value]:
    return lambda items, number: dynamic_index_in_dim(items, number, axis, keepdims=False)
