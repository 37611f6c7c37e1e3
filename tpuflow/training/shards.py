"""Arrays in shares: each chip's part of an array that all of them hold together, and whole arrays back.

A share is one-dimensional: an array's elements row by row, filled up with zeros to a multiple of the chips, are cut in equal parts. Every
array is cut by itself, rather than all of them put in one row: its gradient is sent as soon as it is made, nothing is copied to be sent,
and optimizers see arrays with their shapes and names. The price is less than one element a chip for each array. An array that stacks the
layers of a scan is cut layer by layer, [layers, share]: so a trip can have its layer alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from tpuflow import amp

MOVES = frozenset(
    ("all_gather", "broadcast_in_dim", "convert_element_type", "pad", "reshape", "slice", "squeeze", "transpose", "copy", "copy_p")
)
"""What makes no new numbers: cheap to do again, where keeping the result would keep a whole parameter on every chip."""


def shareable(leaf: Any) -> bool:
    """Whether chips hold shares of an array: floats with an axis. Scalars, integers (counts) and random keys are whole everywhere."""
    return amp.is_float(leaf) and leaf.ndim > 0


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis, or several as one, of so many chips in all. What follows is called inside of a `shard_map` over it, and is about what
    one chip has."""

    name: str | tuple[str, ...]
    chips: int
    stacks: frozenset[tuple[int, ...]] = frozenset()
    """Shapes of the arrays that are cut layer by layer, along the axes behind the first."""

    @property
    def of_layers(self) -> Axis:
        """The same for the layers of a stack, each of which is an array by itself."""
        return replace(self, stacks=frozenset())

    def is_stack(self, shape: Sequence[int]) -> bool:
        """Whether arrays of this shape are cut layer by layer."""
        return tuple(shape) in self.stacks

    def share_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """[share] or, of a stack, [layers, share]: a chip's share of an array, what fills it up included."""
        layers, size = self._rows(shape)
        return (*layers, -(-size // self.chips))

    def spec(self, shape: Sequence[int]) -> PartitionSpec:
        """How what `in_row` makes of an array of this shape is cut."""
        return PartitionSpec(*(None for _ in self._rows(shape)[0]), self.name)

    def in_row(self, x: Any) -> Any:
        """[...] -> [chips * share] or [layers, chips * share]: all shares of an array, one after the other."""
        layers, size = self._rows(x.shape)
        flat, filling = jnp.reshape(x, (*layers, size)), self.chips * self.share_shape(x.shape)[-1] - size
        return jnp.pad(flat, (*((0, 0) for _ in layers), (0, filling))) if filling else flat

    def from_row(self, row: Any, shape: Sequence[int]) -> Any:
        """The array of a shape, of all its shares one after the other."""
        size = self._rows(shape)[1]
        return jnp.reshape(row if row.shape[-1] == size else row[..., :size], shape)

    def mean(self, tree: Any) -> Any:
        """Floating arrays as their means over the chips, divided before they are added so that no sum overflows; others as they are."""
        return jax.tree.map(lambda x: lax.psum(self._part(x), self.name) if amp.is_float(x) else x, tree)

    def share(self, x: jax.Array) -> jax.Array:
        """This chip's share of an array that every chip has: [...] -> [share] or [layers, share]."""
        elems = self.share_shape(x.shape)[-1]
        return lax.dynamic_slice_in_dim(self.in_row(x), lax.axis_index(self.name) * elems, elems, axis=-1)

    def whole(self, share: jax.Array, shape: Sequence[int]) -> jax.Array:
        """An array from everybody's shares: [share] or, layer by layer so that each lands in its place, [layers, share] -> [...]."""
        if self.is_stack(shape):
            return lax.map(lambda layer: self.of_layers.whole(layer, shape[1:]), share)
        return self.from_row(lax.all_gather(share, self.name, tiled=True), shape)

    def mean_share(self, x: jax.Array) -> jax.Array:
        """This chip's share of an array's mean over the chips: the bits of `mean`, since sums go the same way around the ring; but for
        stacks, whose layers each begin at every chip."""
        row = self.in_row(self._part(x))
        return lax.psum_scatter(row, self.name, scatter_dimension=row.ndim - 1, tiled=True)

    def whole_for_a_while(self, share: jax.Array, shape: Sequence[int]) -> jax.Array:
        """As `whole`; its gradient is a share of the mean of all chips' gradients."""
        return _gathered(self, tuple(shape), share)

    def lent(self, x: jax.Array, place: jax.Array) -> jax.Array:
        """An array that every chip has, as it is; its gradient goes to `place`, of the shape of a share: a share of the mean of all
        chips' gradients."""
        return _lent(self, x, place)

    def counted(self, share: jax.Array, shape: Sequence[int], neutral: Any) -> jax.Array:
        """A share with `neutral` in place of what only fills it up."""
        size, last = self._rows(shape)[1], share.ndim - 1
        if share.shape[last] * self.chips == size:
            return share
        places = lax.axis_index(self.name) * share.shape[last] + lax.broadcasted_iota(jnp.int32, share.shape, last)
        return jnp.where(places < size, share, jnp.asarray(neutral, share.dtype))

    def _rows(self, shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """The layers of a stack, and the elements of each; of another array, no layers and all elements."""
        layers = tuple(shape[:1]) if self.is_stack(shape) else ()
        return layers, math.prod(shape[len(layers) :])

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


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lent(axis: Axis, x: jax.Array, place: jax.Array) -> jax.Array:
    return x


def _lend(axis: Axis, x: jax.Array, place: jax.Array) -> tuple[jax.Array, None]:
    return x, None


def _scatter(axis: Axis, kept: None, cotangent: jax.Array) -> tuple[None, jax.Array]:
    return None, axis.mean_share(cotangent)


_lent.defvjp(_lend, _scatter)


def keeping_no_moves(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose backward pass moves and casts again what its forward pass has moved and cast, and keeps everything else. Nothing
    here keeps a compiler from finding that both are the same: that is for who calls it."""
    return jax.checkpoint(function, prevent_cse=False, policy=lambda primitive, *_, **__: primitive.name not in MOVES)


def gathering_again(loss: Callable[[Any], tuple[jax.Array, Any]], shares: Any) -> tuple[tuple[jax.Array, Any], Any]:
    """((loss, others), gradients) of a loss of shares, with others besides, whose backward pass gathers them once more.

    The shares alone are held back by a barrier, until the loss is there: behind it what they are gathered to is found to be something else
    than in the forward pass. All else that is kept for the backward pass is open to the compiler, to compute it again where that is
    cheaper than to keep it.
    """
    value, pull, others = jax.vjp(keeping_no_moves(loss), shares, has_aux=True)
    leaves = jax.tree.leaves(shares)
    held, _ = lax.optimization_barrier((leaves, value))
    again = {id(leaf): behind for leaf, behind in zip(leaves, held, strict=True)}
    (grads,) = jax.tree.map(lambda x: again.get(id(x), x), pull)(jnp.ones_like(value))
    return (value, others), grads
