"""Attention, as the language models share it: who sees whom, and the keys and values that decoding keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from jax import numpy as jnp

Layers = tuple[tuple[jax.Array, jax.Array], ...] | tuple[jax.Array, jax.Array]
"""A pair (keys, values), both [B, S, K, D], for each layer; or one pair of [L, B, S, K, D] for layers in a scan."""


class Cache(NamedTuple):
    """What decoding keeps, in S slots that were allocated at the beginning.

    layers: the keys and values of all layers.
    attended: [B, S] bool; whether what is in a slot is to be seen: not padding.
    filled: int32; how many slots are in use, the same for all sequences: those that differ in length are padded on the left.
    """

    layers: Any
    attended: jax.Array
    filled: jax.Array


class Context(NamedTuple):
    """What every layer gets beside its input.

    visible: bool, broadcast against [B, H, T, S]: whether a query sees a key; None: all see all.
    slot: where in the cache the keys and values of this call go.
    rotation: the cosines and sines of rotary positions, [B or 1, T, 1, D] each; None without.
    """

    visible: jax.Array | None
    slot: jax.Array | int = 0
    rotation: tuple[jax.Array, jax.Array] | None = None


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array | None, dropout: Callable[[jax.Array], jax.Array] | None = None
) -> jax.Array:
    """Mix values by softmax(q k / sqrt(D)): q [B, T, H, D]; k [B, S, K, D]; v [B, S, K, V] -> [B, T, H * V].

    H is a multiple of K: H / K = G queries in a row share a key and a value, and become queries of one head, T * G of them. `dropout` is
    applied to the weights [B, K, T * G, S].
    """
    batch, length, heads, width = q.shape
    groups = heads // k.shape[2]
    q = _grouped(q * width**-0.5, groups)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    if visible is not None:
        seen = visible if groups == 1 or visible.shape[-2] == 1 else jnp.repeat(visible, groups, axis=-2)
        scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
    weights = nn.softmax(scores)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights if dropout is None else dropout(weights), v)
    if groups > 1:
        mixed = mixed.reshape(batch, length, groups, -1, v.shape[-1]).swapaxes(2, 3)  # [B, T * G, K, V] -> [B, T, K, G, V]
    return mixed.reshape(batch, length, heads * v.shape[-1])


def attend_in_blocks(q: jax.Array, k: jax.Array, v: jax.Array, most: int = 1024) -> jax.Array:
    """As `attend` where all see all, for at most so many queries at once: q [B, T, H, D]; k, v [B, S, K, D] -> [B, T, H * D].

    Beyond, blocks of queries go one after the other through a loop, and the backward pass computes each block's weights again: what is
    stored at any time is [B, K, block * G, S] instead of [B, K, T * G, S], as for the pixels of images.
    """
    batch, length, heads, width = q.shape
    block = next(size for size in range(min(most, length), 0, -1) if length % size == 0)
    if block == length:
        return attend(q, k, v, None)
    blocks = jnp.moveaxis(q.reshape(batch, -1, block, heads, width), 1, 0)  # [B, T, H, D] -> [blocks, B, block, H, D]
    found = jax.lax.map(jax.checkpoint(lambda part: attend(part, k, v, None), prevent_cse=False), blocks)
    return jnp.moveaxis(found, 0, 1).reshape(batch, length, heads * width)


def _grouped(q: jax.Array, groups: int) -> jax.Array:
    """[B, T, K * G, D] -> [B, T * G, K, D]."""
    if groups == 1:
        return q
    batch, length, _, width = q.shape
    return q.reshape(batch, length, -1, groups, width).swapaxes(2, 3).reshape(batch, length * groups, -1, width)


def unpadded(attention_mask: jax.Array | None) -> jax.Array | None:
    """[B, T], not 0 where a token is to be seen -> what a `Context` wants: [B, 1, 1, T] bool."""
    return None if attention_mask is None else (attention_mask != 0)[:, None, None]


def causal(length: int, attention_mask: jax.Array | None) -> jax.Array:
    """A token sees those at and before its place: [T, T] bool; with a mask [B, T] only those that are no padding: [B, 1, T, T]."""
    places = jnp.arange(length)
    before, tokens = places <= places[:, None], unpadded(attention_mask)
    return before if tokens is None else before & tokens


def empty_cache(layers: int, shape: tuple[int, int, int, int], dtype: Any, *, scan: bool) -> Cache:
    """A cache for keys and values of a shape [B, S, K, D] in each of so many layers."""
    pair = (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    kept = tuple(jnp.broadcast_to(array, (layers, *shape)) for array in pair) if scan else (pair,) * layers
    return Cache(kept, jnp.zeros(shape[:2], bool), jnp.zeros((), jnp.int32))


def admit(cache: Cache, tokens: jax.Array, attention_mask: jax.Array | None) -> tuple[Cache, jax.Array, Context]:
    """Give the next tokens [B, T] their slots: (the cache, still without their keys and values, their positions [B, T], context).

    attention_mask: [B, T], 0 where a token is padding; it gets no position of its own.
    """
    batch, length = tokens.shape
    real = jnp.ones((batch, length), bool) if attention_mask is None else attention_mask != 0
    seen = cache.attended.sum(1, dtype=jnp.int32)[:, None]  # of each sequence, so far
    positions = jnp.maximum(seen + jnp.cumsum(real, 1, dtype=jnp.int32) - 1, 0)
    attended = jax.lax.dynamic_update_slice_in_dim(cache.attended, real, cache.filled, 1)
    slots = jnp.arange(attended.shape[1])
    before = slots <= (cache.filled + jnp.arange(length))[:, None]  # [T, S]
    context = Context(before & attended[:, None, None], cache.filled)
    return Cache(cache.layers, attended, cache.filled + length), positions, context


def remember(cache: tuple[jax.Array, jax.Array] | None, k: jax.Array, v: jax.Array, context: Context) -> tuple[Any, Any, Any]:
    """(k, v, the layer's pair): without a cache k and v [B, T, K, D] themselves, else all [B, S, K, D] with the new ones in their slots."""
    if cache is None:
        return k, v, None
    keys, values = (
        jax.lax.dynamic_update_slice_in_dim(kept, new.astype(kept.dtype), context.slot, 1) for kept, new in zip(cache, (k, v), strict=True)
    )
    return keys, values, (keys, values)
