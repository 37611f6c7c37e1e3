"""Operations that `vmap` makes slow ones of for XLA:CPU, with lanes in a way of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

Value = Any


def convolution(lhs: Value, rhs: Value, *arguments: Any, **options: Any) -> Value:
    """`lax.conv_general_dilated`. With lanes on both sides, as gradients of kernels have them on several chips, `vmap` would make groups of
    channels of them, which XLA:CPU takes several times as long for."""

    @custom_vmap
    def convolve(lhs: Value, rhs: Value) -> Value:
        return lax.conv_general_dilated(lhs, rhs, *arguments, **options)

    @convolve.def_vmap
    def _(axis_size: int, batched: tuple[bool, bool], lhs: Value, rhs: Value) -> tuple[Value, bool]:
        def one(lhs: Value, rhs: Value) -> Value:
            return convolution(lhs, rhs, *arguments, **options)

        if all(batched):
            return lax.map(lambda pair: one(*pair), (lhs, rhs)), True
        plain = lambda lhs, rhs: lax.conv_general_dilated(lhs, rhs, *arguments, **options)  # noqa: E731
        return jax.vmap(plain, tuple(0 if b else None for b in batched))(lhs, rhs), True

    return convolve(lhs, rhs)


def picked(items: Value, number: Value, axis: int = 0) -> Value:
    """items[number] along an axis. With lanes on the items alone `vmap` would gather it, which XLA:CPU makes copies for."""

    @custom_vmap
    def pick(items: Value, number: Value) -> Value:
        return lax.dynamic_index_in_dim(items, number, axis, keepdims=False)

    @pick.def_vmap
    def _(axis_size: int, batched: tuple[bool, bool], items: Value, number: Value) -> tuple[Value, bool]:
        if not batched[1]:
            return picked(items, number, axis + 1), True
        return _each_picked(items, number, axis, batched), True

    return pick(items, number)


def of_lane(rows: Value, lane: Value, axis: int = 0) -> Value:
    """rows[lane] along an axis, `lane` being the `lax.axis_index` of a `vmap` with as many lanes as there are rows: a row is a lane's own
    then, where it lies."""

    @custom_vmap
    def own(rows: Value, lane: Value) -> Value:
        return lax.dynamic_index_in_dim(rows, lane, axis, keepdims=False)

    @own.def_vmap
    def _(axis_size: int, batched: tuple[bool, bool], rows: Value, lane: Value) -> tuple[Value, bool]:
        if not batched[1]:
            return of_lane(rows, lane, axis + 1), True
        return _each_picked(rows, lane, axis, batched) if batched[0] else jnp.moveaxis(rows, axis, 0), True

    return own(rows, lane)


def _each_picked(items: Value, numbers: Value, axis: int, batched: tuple[bool, bool]) -> Value:
    """With a number for each lane, as `vmap` does it."""

    def pick(items: Value, number: Value) -> Value:
        return lax.dynamic_index_in_dim(items, number, axis, keepdims=False)

    return jax.vmap(pick, tuple(0 if lanes else None for lanes in batched))(items, numbers)
