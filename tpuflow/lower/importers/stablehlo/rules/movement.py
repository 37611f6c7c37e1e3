"""Rules of operations that make, move, cut and join arrays, and of those that change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import NO_ATTRS, TensorType, Value
from tpuflow.lower.importers.stablehlo.walk import RULES
from tpuflow.lower.operations import movement
from tpuflow.lower.operations.by_position import by_position, summed
from tpuflow.lower.operations.complex import Number, Type, packed, planes
from tpuflow.lower.operations.forms import UnsupportedForm
from tpuflow.lower.operations.memories import device_put
from tpuflow.lower.operations.window import Sizes

RULES.enter({"stablehlo.transpose": Builder.transpose}, permutation="permutation")
RULES.enter({"stablehlo.slice": Builder.slice}, start_indices="start", limit_indices="limit", strides="stride")
RULES.enter({
    "stablehlo.dynamic_update_slice": movement.dynamic_update_slice, "stablehlo.create_token": movement.token,
    "stablehlo.after_all": movement.token,
})  # fmt: skip


@RULES.lowers("stablehlo.dynamic_slice")
def _dynamic_slice(b: Builder, x: Value, *starts: Value, slice_sizes: Sizes) -> Value:
    """A piece; or a number that a chip looks up for itself in a table of all."""
    piece = movement.dynamic_slice(b, x, *starts, slice_sizes=slice_sizes)
    numbers = by_position(b.maker, b.mesh, piece) if b.mesh else None
    total = None if numbers is None else summed(b, numbers)
    return piece if total is None else b.reshape(b.convert(total, x.dtype), piece.shape)


@RULES.lowers("stablehlo.constant")
def _constant(b: Builder, *, value: object) -> Value:
    if not isinstance(value, np.ndarray):
        raise UnsupportedForm(f"its value is not given as numbers ({value})")
    return b.constant(value)


@RULES.lowers("stablehlo.iota")
def _iota(b: Builder, *, iota_dimension: int, types: tuple[TensorType]) -> Value:
    return movement.iota(b, types[0].dtype, types[0].shape, iota_dimension)


@RULES.lowers("stablehlo.broadcast_in_dim")
def _broadcast_in_dim(b: Builder, x: Value, *, broadcast_dimensions: Sizes, types: tuple[TensorType]) -> Value:
    return movement.broadcast_in_dim(b, x, shape=types[0].shape, broadcast_dimensions=broadcast_dimensions)


@RULES.lowers("stablehlo.reshape")
def _reshape(b: Builder, x: Value, *, types: tuple[TensorType]) -> Value:
    return b.reshape(x, types[0].shape)


@RULES.lowers("stablehlo.reverse")
def _reverse(b: Builder, x: Value, *, dimensions: Sizes) -> Value:
    return b.reverse(x, [d for d in dimensions if x.shape[d] > 1])


@RULES.lowers("stablehlo.concatenate")
def _concatenate(b: Builder, *parts: Value, dimension: int) -> Value:
    """JAX joins many parts sixteen at a time, and what comes of that."""
    return b.concatenate([inner for part in parts for inner in _parts(b, part, dimension)], dimension)


def _parts(b: Builder, x: Value, axis: int) -> tuple[Value, ...]:
    """What x was joined from along the axis."""
    made = b.maker(x)
    return made.inputs if made is not None and made.op == "concatenate" and made.attrs["axis"] == axis else (x,)


@RULES.lowers("stablehlo.pad")
def _pad(b: Builder, x: Value, value: Value, *, edge_padding_low: Sizes, edge_padding_high: Sizes, interior_padding: Sizes) -> Value:
    return b.pad(x, value, edge_padding_low, edge_padding_high, interior_padding)


@RULES.lowers("sdy.sharding_constraint", "sdy.reshard", "sdy.propagation_barrier")
def _identity(b: Builder, x: Value) -> Value:
    """Where an array lies: on the one device."""
    return x


@RULES.lowers("mhlo.copy")
def _copy(b: Builder, x: Value) -> Value:
    """What XLA's passes leave between a value and its like in another place."""
    return x


@RULES.lowers("sdy.sharding_group")
def _nothing(b: Builder, x: Value) -> tuple[Value, ...]:
    return ()


def _optimization_barrier(
    b: Builder, *operands: Number, types: tuple[Type, ...], attributes: Mapping[str, Any] = NO_ATTRS
) -> tuple[Number, ...]:
    """One that says to which memory its operand goes is what the partitioner has left of that (`partitioner.PLACEMENT`)."""
    kind = attributes.get("_xla_buffer_placement")
    return packed(b.barrier(planes(operands)), types) if kind is None else (device_put(b, operands[0], kind),)


RULES.enter({"stablehlo.optimization_barrier": _optimization_barrier}, **{"mhlo.frontend_attributes": "attributes"})
