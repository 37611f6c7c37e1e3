"""Rules of primitives that make, move, cut and join arrays, and of those that change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpuflow.dtypes import from_numpy as dtype_of
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.importers.jaxpr.registry import enter, lowers
from tpuflow.lower.operations import movement
from tpuflow.lower.operations.complex import Number
from tpuflow.lower.operations.memories import device_put

enter({
    "broadcast_in_dim": movement.broadcast_in_dim, "split": movement.split, "unstack": movement.unstack, "stack": movement.stack,
    "tile": movement.tile, "dynamic_slice": movement.dynamic_slice, "dynamic_update_slice": movement.dynamic_update_slice,
    "create_token": movement.token, "after_all": movement.token,
})  # fmt: skip
enter({"transpose": Builder.transpose}, permutation="permutation")
enter({"slice": Builder.slice}, start_indices="start", limit_indices="limit", strides="stride")


@lowers(
    "copy", "stop_gradient", "sharding_constraint", "layout_constraint", "reshard",
    "name", "pvary", "stage", "random_clone", "multiple_of", keys=True,
)  # fmt: skip
def _identity(b: Builder, *operands: Value) -> tuple[Value, ...]:
    return operands


@lowers("device_put", keys=True)
def _device_put(b: Builder, *operands: Number, devices: Sequence[Any]) -> tuple[Number, ...]:
    """To a `jax.memory.Space`, or to a sharding, which may name a kind of memory."""
    kinds = [getattr(d, "memory_kind", None) or getattr(d, "name", "") for d in devices]
    return tuple(device_put(b, x, kind) for x, kind in zip(operands, kinds, strict=True))


@lowers("tie", keys=True)
def _tie(b: Builder, _: Value, y: Value) -> Value:
    return y


@lowers("dce_sink", keys=True)
def _dce_sink(b: Builder, x: Value) -> tuple[Value, ...]:
    """Keeps JAX from dropping what makes x; here nobody needs it."""
    return ()


@lowers("reshape")
def _reshape(b: Builder, x: Value, *, new_sizes: Sequence[int], dimensions: Sequence[int] | None) -> Value:
    return b.reshape(b.transpose(x, dimensions) if dimensions else x, new_sizes)


@lowers("squeeze")
def _squeeze(b: Builder, x: Value, *, dimensions: Sequence[int]) -> Value:
    return b.reshape(x, [n for i, n in enumerate(x.shape) if i not in dimensions])


@lowers("rev")
def _rev(b: Builder, x: Value, *, dimensions: Sequence[int]) -> Value:
    return b.reverse(x, [d for d in dimensions if x.shape[d] > 1])


@lowers("concatenate")
def _concatenate(b: Builder, *parts: Value, dimension: int) -> Value:
    return b.concatenate(parts, dimension)


@lowers("pad")
def _pad(b: Builder, x: Value, value: Value, *, padding_config: Sequence[tuple[int, int, int]]) -> Value:
    low, high, interior = zip(*(map(int, row) for row in padding_config), strict=True) if padding_config else ((), (), ())
    return b.pad(x, value, low, high, interior)


@lowers("iota")
def _iota(b: Builder, *, dtype: Any, shape: Sequence[int], dimension: int) -> Value:
    return movement.iota(b, dtype_of(dtype), shape, dimension)


@lowers("empty", "empty2")
def _empty(b: Builder, *, dtype: Any, shape: Sequence[int] = ()) -> Value:
    return b.full(TensorType(dtype_of(dtype), tuple(shape)), 0)
