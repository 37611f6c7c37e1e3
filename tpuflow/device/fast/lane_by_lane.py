"""XLA:CPU operations that are slow with lanes on both operands, lane by lane there."""

from __future__ import annotations

from typing import Any

import jax
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
