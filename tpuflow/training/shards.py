"""Sharded arrays, as ZeRO and FSDP have them: how an array is cut into one shard a chip, and the collectives between shard and array.

A shard is one-dimensional: the array's elements are flattened in row-major order, padded with zeros to a multiple of the number of chips,
and cut into equal parts. Each array is sharded by itself instead of in one flat buffer with all others: its gradient can be sent as soon as
it is computed, nothing is copied into a buffer first, and optimizers see arrays with their own shapes and names. The padding costs less
than one element a chip for each array. An array that stacks the layers of a scan is sharded layer by layer, [layers, shard], so that a trip
of the scan can gather its layer alone.
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
"""Primitives that move or cast elements and compute none. They are cheap to repeat in the backward pass, where keeping their results would
keep a whole parameter on every chip."""


def is_shardable(leaf: Any) -> bool:
    """Whether an array is sharded: floating-point arrays with an axis are. Every chip holds scalars, integers and random keys whole."""
    return amp.is_float(leaf) and leaf.ndim > 0


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis, or several mesh axes as one, over which arrays are sharded; `chips` is their number in all.

    The methods that take or return shards are called by one chip, inside of a `shard_map` over the axis.
    """

    name: str | tuple[str, ...]
    chips: int
    stacks: frozenset[tuple[int, ...]] = frozenset()
    """Shapes of the arrays that stack layers along their first axis, and are sharded layer by layer."""

    @property
    def per_layer(self) -> Axis:
        """The axis for single layers of a stack, each of which is an ordinary array."""
        return replace(self, stacks=frozenset())

    def is_stack(self, shape: Sequence[int]) -> bool:
        """Whether arrays of this shape are sharded layer by layer."""
        return tuple(shape) in self.stacks

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one chip's shard, padding included: [shard] or, of a stack, [layers, shard]."""
        layers, size = self._layers_and_size(shape)
        return (*layers, -(-size // self.chips))

    def spec(self, shape: Sequence[int]) -> PartitionSpec:
        """The partition spec of the result of `flatten` for an array of this shape."""
        return PartitionSpec(*(None for _ in self._layers_and_size(shape)[0]), self.name)

    def flatten(self, x: Any) -> Any:
        """An array flattened and padded, which is its shards one after the other: [...] -> [chips * shard] or [layers, chips * shard]."""
        layers, size = self._layers_and_size(x.shape)
        flat, padding = jnp.reshape(x, (*layers, size)), self.chips * self.shard_shape(x.shape)[-1] - size
        return jnp.pad(flat, (*((0, 0) for _ in layers), (0, padding))) if padding else flat

    def unflatten(self, flat: Any, shape: Sequence[int]) -> Any:
        """The inverse of `flatten`, for an array of this shape."""
        size = self._layers_and_size(shape)[1]
        return jnp.reshape(flat if flat.shape[-1] == size else flat[..., :size], shape)

    def mean(self, tree: Any) -> Any:
        """Floating-point arrays as their means over the chips (divided before they are added, so that no sum overflows); others as they
        are."""
        return jax.tree.map(lambda x: lax.psum(self._divided(x), self.name) if amp.is_float(x) else x, tree)

    def local_shard(self, x: jax.Array) -> jax.Array:
        """This chip's shard of an array that every chip holds: [...] -> [shard] or [layers, shard]."""
        elems = self.shard_shape(x.shape)[-1]
        return lax.dynamic_slice_in_dim(self.flatten(x), lax.axis_index(self.name) * elems, elems, axis=-1)

    def all_gather(self, shard: jax.Array, shape: Sequence[int]) -> jax.Array:
        """The array of this shape, gathered from the shards of all chips: [shard] -> [...]. A stack, [layers, shard], is gathered layer by
        layer, so that each layer lands in its place."""
        if self.is_stack(shape):
            return lax.map(lambda layer: self.per_layer.all_gather(layer, shape[1:]), shard)
        return self.unflatten(lax.all_gather(shard, self.name, tiled=True), shape)

    def reduce_scatter_mean(self, x: jax.Array) -> jax.Array:
        """This chip's shard of an array's mean over the chips.

        It has the bits of `mean`, since both add in the same order around the ring; stacks differ, whose layers each start at every chip.
        """
        flat = self.flatten(self._divided(x))
        return lax.psum_scatter(flat, self.name, scatter_dimension=flat.ndim - 1, tiled=True)

    def gather_param(self, shard: jax.Array, shape: Sequence[int]) -> jax.Array:
        """As `all_gather`, with the gradient that data parallelism needs: `reduce_scatter_mean` of the chips' gradients."""
        return _gather_param(self, tuple(shape), shard)

    def with_grad_shard(self, x: jax.Array, grad_shard: jax.Array) -> jax.Array:
        """An array that every chip holds, unchanged. Its gradient flows to `grad_shard` instead of to `x`, as `reduce_scatter_mean` of the
        chips' gradients; only the shape of `grad_shard` is used, that of a shard."""
        return _with_grad_shard(self, x, grad_shard)

    def mask_padding(self, shard: jax.Array, shape: Sequence[int], neutral: Any) -> jax.Array:
        """A shard of an array of this shape with `neutral` in place of its padding."""
        size, last = self._layers_and_size(shape)[1], shard.ndim - 1
        if shard.shape[last] * self.chips == size:
            return shard
        positions = lax.axis_index(self.name) * shard.shape[last] + lax.broadcasted_iota(jnp.int32, shard.shape, last)
        return jnp.where(positions < size, shard, jnp.asarray(neutral, shard.dtype))

    def _layers_and_size(self, shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """([layers], elements of one layer) of a stack; ([], all elements) of another array."""
        layers = tuple(shape[:1]) if self.is_stack(shape) else ()
        return layers, math.prod(shape[len(layers) :])

    def _divided(self, x: jax.Array) -> jax.Array:
        return x / jnp.asarray(self.chips, x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_param(axis: Axis, shape: tuple[int, ...], shard: jax.Array) -> jax.Array:
    return axis.all_gather(shard, shape)


def _gather_param_fwd(axis: Axis, shape: tuple[int, ...], shard: jax.Array) -> tuple[jax.Array, None]:
    return axis.all_gather(shard, shape), None


def _gather_param_bwd(axis: Axis, shape: tuple[int, ...], residuals: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (axis.reduce_scatter_mean(cotangent),)


_gather_param.defvjp(_gather_param_fwd, _gather_param_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_grad_shard(axis: Axis, x: jax.Array, grad_shard: jax.Array) -> jax.Array:
    return x


def _with_grad_shard_fwd(axis: Axis, x: jax.Array, grad_shard: jax.Array) -> tuple[jax.Array, None]:
    return x, None


def _with_grad_shard_bwd(axis: Axis, residuals: None, cotangent: jax.Array) -> tuple[None, jax.Array]:
    return None, axis.reduce_scatter_mean(cotangent)


_with_grad_shard.defvjp(_with_grad_shard_fwd, _with_grad_shard_bwd)


def rematerialize_moves(function: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.checkpoint` with a policy that recomputes `MOVES` (gathers and casts among them) in the backward pass and saves all else.

    There is no optimization barrier in it, so that a compiler may find forward and recomputed moves to be equal and keep the result after
    all; callers prevent that where they need to.
    """
    return jax.checkpoint(function, prevent_cse=False, policy=lambda primitive, *_, **__: primitive.name not in MOVES)


def value_and_grad_regathering(loss: Callable[[Any], tuple[jax.Array, Any]], shards: Any) -> tuple[tuple[jax.Array, Any], Any]:
    """((loss, aux), gradients) of a loss of sharded parameters, whose backward pass gathers the parameters once more.

    A barrier makes the backward pass's shards depend on the loss, so that the compiler does not merge both gathers. Only the shards are
    behind it: the compiler stays free to recompute any other residual where that is cheaper than keeping it.
    """
    value, pull, others = jax.vjp(rematerialize_moves(loss), shards, has_aux=True)
    leaves = jax.tree.leaves(shards)
    held, _ = lax.optimization_barrier((leaves, value))
    again = {id(leaf): behind for leaf, behind in zip(leaves, held, strict=True)}
    (grads,) = jax.tree.map(lambda x: again.get(id(x), x), pull)(jnp.ones_like(value))
    return (value, others), grads
