"""Counters of 64 bits, which the device has not: JAX numbers the elements of arrays of random bits with them, from a chip's own first
element on where they are cut.

Such a number is held as u32 as long as the largest that it may be is known to fit; a number that may be larger is refused by its type.
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
    """64-bit unsigned numbers from 0 to `most`, as u32."""

    value: Value
    most: int


Attributes = Mapping[str, Any]
Made = tuple[Value, int]


def count(b: Builder, name: str, operands: Sequence[Counter], attributes: Attributes, kind: TensorType) -> Counter | None:
    """The result of an operation on counters whose u32 type is `kind`; None if it may not fit, or the operation has no rule here."""
    rule = _RULES.get(name)
    made = None if rule is None else rule(b, operands, attributes, kind)
    return Counter(*made) if made is not None and made[1] < 1 << 32 else None


def _iota(b: Builder, operands: Sequence[Counter], attributes: Attributes, kind: TensorType) -> Made:
    axis = attributes["iota_dimension"]
    return b.iota(kind, axis), max(0, kind.shape[axis] - 1)


def _constant(b: Builder, operands: Sequence[Counter], attributes: Attributes, kind: TensorType) -> Made | None:
    data = attributes["value"]
    if not isinstance(data, np.ndarray):
        return None
    most = int(data.max(initial=0))
    return (b.constant(data.astype(U32.numpy)), most) if most < 1 << 32 else None


def _broadcast(b: Builder, operands: Sequence[Counter], attributes: Attributes, kind: TensorType) -> Made:
    (x,) = operands
    return broadcast_in_dim(b, x.value, shape=kind.shape, broadcast_dimensions=attributes["broadcast_dimensions"]), x.most


def _reshape(b: Builder, operands: Sequence[Counter], attributes: Attributes, kind: TensorType) -> Made:
    (x,) = operands
    return b.reshape(x.value, kind.shape), x.most


def _add(b: Builder, operands: Sequence[Counter], attributes: Attributes, kind: TensorType) -> Made:
    x, y = operands
    return b.add(x.value, y.value), x.most + y.most


def _multiply(b: Builder, operands: Sequence[Counter], attributes: Attributes, kind: TensorType) -> Made:
    x, y = operands
    return b.mul(x.value, y.value), x.most * y.most


def _shift_right(b: Builder, operands: Sequence[Counter], attributes: Attributes, kind: TensorType) -> Made | None:
    x, y = operands
    amount = b.known(y.value)
    if amount is None:
        return None
    most = x.most >> int(amount)
    return (b.shr_logical(x.value, y.value) if most else b.full(kind, 0)), most


def counted(b: Builder, name: str, x: Value, kind: TensorType) -> Counter | None:
    """A conversion from integers that are known not to be negative; None for other operations."""
    if name != "stablehlo.convert" or x.dtype.is_float:
        return None
    numbers = by_position(b.maker, b.mesh, x) if b.mesh else None
    least, most = range_of(b, x) if numbers is None else (int(numbers.min()), int(numbers.max()))
    return Counter(b.convert(x, U32), most) if least >= 0 else None


_RULES: Mapping[str, Callable[[Builder, Sequence[Counter], Attributes, TensorType], Made | None]] = {
    "stablehlo.iota": _iota,
    "stablehlo.constant": _constant,
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.reshape": _reshape,
    "stablehlo.add": _add,
    "stablehlo.multiply": _multiply,
    "stablehlo.shift_right_logical": _shift_right,
}
