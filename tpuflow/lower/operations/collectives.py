"""Collectives over a named axis of one device, which has nothing to add up and is alone to send itself anything."""

from __future__ import annotations

from collections.abc import Sequence

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value


def all_gather(b: Builder, x: Value, axis: int, *, tiled: bool) -> Value:
    """One shard in a row: an axis of size 1, unless shards are put together along one they have."""
    return x if tiled else b.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:]))


def reduce_scatter(b: Builder, x: Value, axis: int, *, tiled: bool) -> Value:
    """The sum over one device, of which it keeps its share: all."""
    return x if tiled else b.reshape(x, (*x.shape[:axis], *x.shape[axis + 1 :]))


def collective_permute(b: Builder, x: Value, pairs: Sequence[tuple[int, int]]) -> Value:
    """What a device sends to itself; zeros if nobody sends it anything."""
    return x if pairs else b.full(x.type, 0)
