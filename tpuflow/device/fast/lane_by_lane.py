"""Operations that `vmap` makes slow ones of for XLA:CPU, with lanes in a way of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

Value = Any


def convolution(lhs: Value, rhs: Value, *arguments: Any, **options: Any) -> Value:
    """`lax.conv_general_dilated`. With lanes on both sides, as gradients of kernels have them on several chips, `vmap` would make groups of
    channels of them, which XLA:CPU takes several times as long for."""

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
    """items[number] along an axis. With lanes on the items alone `vmap` would gather it, which XLA:CPU makes copies for."""
    return _picking(axis, _each_picked)(items, number)


def of_lane(rows: Value, lane: Value, axis: int = 0) -> Value:
    """rows[lane] along an axis, `lane` being the `lax.axis_index` of a `vmap` with as many lanes as there are rows: a row is a lane's own
    then, where it lies."""
    return _picking(axis, lambda rows, lanes, axis: jnp.moveaxis(rows, axis, 0))(rows, lane)


def _picking(axis: int, shared: Callable[[Value, Value, int], Value]) -> Callable[[Value, Value], Value]:
    """items[number] along an axis; `shared` is what lanes get of items that have no lanes, by a number each."""
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
    return lambda items, number: lax.dynamic_index_in_dim(items, number, axis, keepdims=False)
