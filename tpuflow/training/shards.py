"""Arrays in shares: each chip's part of an array that all of them hold together, and whole arrays back.

A share is one-dimensional: an array's elements row by row, filled up with zeros to a multiple of the chips, are cut in equal parts. Every
array is cut by itself, rather than all of them put in one row: its gradient is sent as soon as it is made, nothing is copied to be sent,
and optimizers see arrays with their shapes and names. The price is less than one element a chip for each array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpuflow import amp

MOVES = frozenset(
    ("all_gather", "broadcast_in_dim", "convert_element_type", "pad", "reshape", "slice", "squeeze", "transpose", "copy", "copy_p")
)
"""What makes no new numbers: cheap to do again, where keeping the result would keep a whole parameter on every chip."""


def shareable(leaf: Any) -> bool:
    """Whether chips hold shares of an array: floats with an axis. Scalars, integers (counts) and random keys are whole everywhere."""
    return amp.is_float(leaf) and leaf.ndim > 0


def share_elems(shape: Sequence[int], chips: int) -> int:
    """Elements of a chip's share of an array, those that fill it up included."""
    return -(-math.prod(shape) // chips)


def in_row(x: Any, chips: int) -> Any:
    """[...] -> [chips * share_elems]: all shares of an array, one after the other."""
    flat = jnp.reshape(x, -1)
    filling = chips * share_elems(x.shape, chips) - flat.size
    return jnp.pad(flat, (0, filling)) if filling else flat


def from_row(row: Any, shape: Sequence[int]) -> Any:
    """The array of a shape, of all its shares one after the other."""
    size = math.prod(shape)
    return jnp.reshape(row if row.size == size else row[:size], shape)


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis, or several as one, of so many chips in all. What follows is called inside of a `shard_map` over it, and is about what
    one chip has."""

    name: str | tuple[str, ...]
    chips: int

    def mean(self, tree: Any) -> Any:
        """Floating arrays as their means over the chips, divided before they are added so that no sum overflows; others as they are."""
        return jax.tree.map(lambda x: lax.psum(self._part(x), self.name) if amp.is_float(x) else x, tree)

    def share(self, x: jax.Array) -> jax.Array:
        """This chip's share of an array that every chip has: [...] -> [share_elems]."""
        elems = share_elems(x.shape, self.chips)
        return lax.dynamic_slice_in_dim(in_row(x, self.chips), lax.axis_index(self.name) * elems, elems)

    def whole(self, share: jax.Array, shape: Sequence[int]) -> jax.Array:
        """An array from everybody's shares: [share_elems] -> [...]."""
        return from_row(lax.all_gather(share, self.name, tiled=True), shape)

    def mean_share(self, x: jax.Array) -> jax.Array:
        """This chip's share of an array's mean over the chips: the bits of `mean`, since sums go the same way around the ring."""
        return lax.psum_scatter(in_row(self._part(x), self.chips), self.name, tiled=True)

    def whole_for_a_while(self, share: jax.Array, shape: Sequence[int]) -> jax.Array:
        """As `whole`; its gradient is a share of the mean of all chips' gradients."""
        return _gathered(self, tuple(shape), share)

    def counted(self, share: jax.Array, shape: Sequence[int], neutral: Any) -> jax.Array:
        """A share with `neutral` in place of what only fills it up."""
        size = math.prod(shape)
        if share.size * self.chips == size:
            return share
        places = lax.axis_index(self.name) * share.size + lax.iota(jnp.int32, share.size)
        return jnp.where(places < size, share, jnp.asarray(neutral, share.dtype))

    def _part(self, x: jax.Array) -> jax.Array:
        return x / jnp.asarray(self.chips, x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(axis: Axis, shape: tuple[int, ...], share: jax.Array) -> jax.Array:
    return axis.whole(share, shape)


def _forward(axis: Axis, shape: tuple[int, ...], share: jax.Array) -> tuple[jax.Array, None]:
    return axis.whole(share, shape), None


def _backward(axis: Axis, shape: tuple[int, ...], kept: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (axis.mean_share(cotangent),)


_gathered.defvjp(_forward, _backward)


def keeping_no_moves(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose backward pass moves and casts again what its forward pass has moved and cast, and keeps everything else."""
    return jax.checkpoint(function, policy=lambda primitive, *_, **__: primitive.name not in MOVES)
