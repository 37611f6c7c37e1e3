"""64-bit counters, which the device lacks: JAX numbers the elements of an array of random bits with them (on a mesh, from the first
element of each chip's shard on).

Such a value is represented as u32 while a known upper bound fits in 32 bits; one that may exceed it is refused by its type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpuflow.dtypes import U32
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.operations.by_position import by_position
from tpuflow.lower.operations.movement import broadcast_in_dim
from tpuflow.lower.operations.ranges import range_of


@dataclass(frozen=True, slots=True)
class Counter:
    """64-bit unsigned integers between 0 and `upper_bound`, held in `value` as u32."""

    value: Value
    upper_bound: int


Attributes = Mapping[str, Any]
Bounded = tuple[Value, int]


def lower_counter_operation(b: Builder, name: str, operands: Sequence[Counter], attributes: Attributes, kind: TensorType) -> Counter | None:
    """The result, of the u32 type `kind`, of an operation on counters; None if it may exceed 32 bits or the operation has no rule here."""
    rule = _RULES.get(name)
    made = None if rule is None else rule(b, operands, attributes, kind)
    return Counter(*made) if made is not None and made[1] < 1 << 32 else None


def _iota(b: Builder, operands: Sequence[Counter], attributes: Attributes, kind: TensorType) -> Bounded:
    axis = attributes["iota_dimension"]
    return b.iota(kind, axis), max(0, kind.shape[axis] - 1)


def _constant(b: Builder, operands: Sequence[Counter], attributes: Attributes, kind: TensorType) -> Bounded | None:
    data = attributes["value"]
    if not isinstance(data, np.ndarray):
        return None
    upper_bound = int(data.max(initial=0))
    return (b.constant(data.astype(U32.numpy)), upper_bound) if upper_bound < 1 << 32 else None


def _broadcast(b: Builder, operands: Sequence[Counter], attributes: Attributes, kind: TensorType) -> Bounded:
    (x,) = operands
    return broadcast_in_dim(b, x.value, shape=kind.shape, broadcast_dimensions=attributes["broadcast_dimensions"]), x.upper_bound


def _reshape(b: Builder, operands: Sequence[Counter], attributes: Attributes, kind: TensorType) -> Bounded:
    (x,) = operands
    return b.reshape(x.value, kind.shape), x.upper_bound


def _add(b: Builder, operands: Sequence[Counter], attributes: Attributes, kind: TensorType) -> Bounded:
    x, y = operands
    return b.add(x.value, y.value), x.upper_bound + y.upper_bound


def _multiply(b: Builder, operands: Sequence[Counter], attributes: Attributes, kind: TensorType) -> Bounded:
    x, y = operands
    return b.mul(x.value, y.value), x.upper_bound * y.upper_bound


def _shift_right(b: Builder, operands: Sequence[Counter], attributes: Attributes, kind: TensorType) -> Bounded | None:
    x, y = operands
    amount = b.known(y.value)
    if amount is None:
        return None
    upper_bound = x.upper_bound >> int(amount)
    return (b.shr_logical(x.value, y.value) if upper_bound else b.full(kind, 0)), upper_bound


def convert_to_counter(b: Builder, name: str, x: Value, kind: TensorType) -> Counter | None:
    """A conversion of integers that are known to be non-negative to a counter; None for any other operation."""
    if name != "stablehlo.convert" or x.dtype.is_float:
        return None
    numbers = by_position(b.maker, b.mesh, x) if b.mesh else None
    least, upper_bound = range_of(b, x) if numbers is None else (int(numbers.min()), int(numbers.max()))
    return Counter(b.convert(x, U32), upper_bound) if least >= 0 else None


_RULES: Mapping[str, Callable[[Builder, Sequence[Counter], Attributes, TensorType], Bounded | None]] = {
    "stablehlo.iota": _iota,
    "stablehlo.constant": _constant,
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.reshape": _reshape,
    "stablehlo.add": _add,
    "stablehlo.multiply": _multiply,
    "stablehlo.shift_right_logical": _shift_right,
}
