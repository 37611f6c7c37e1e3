"""The values of elementwise nodes in the device's arithmetic, for constant folding and for the oracle (`interpret`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tpuflow.dtypes import DType
from tpuflow.isa.elementwise import BINARY, UNARY
from tpuflow.isa.numpy_arithmetic import NumpyArithmetic
from tpuflow.isa.numpy_rounding import splat

DEVICE = NumpyArithmetic()

Compute = Callable[..., np.ndarray]
Attrs = Mapping[str, Any]

_OTHER: Mapping[str, Callable[[Attrs, Sequence[DType], DType], Compute]] = {
    "is_finite": lambda attrs, types, result: lambda a: DEVICE.is_finite(a, types[0]),
    "compare": lambda attrs, types, result: lambda a, b: DEVICE.compare(attrs["direction"], a, b, types[0]),
    "select": lambda attrs, types, result: lambda p, a, b: DEVICE.select(p, a, b, result),
    "convert": lambda attrs, types, result: lambda a: DEVICE.convert(a, types[0], result),
    "bitcast": lambda attrs, types, result: lambda a: DEVICE.bitcast(a, types[0], result),
}


def meaning(op: str, attrs: Attrs, types: Sequence[DType], result: DType) -> Compute:
    """The NumPy function of an elementwise operation: arrays of the operands' `types` -> an array of type `result`."""
    if op in UNARY:
        return lambda a: DEVICE.unary(op, a, types[0])
    if op in BINARY:
        return lambda a, b: DEVICE.binary(op, a, b, types[0])
    return _OTHER[op](attrs, types, result)


def fold_splats(
    op: str, attrs: Attrs, values: Sequence[bool | int | float], types: Sequence[DType], result: DType
) -> bool | int | float | None:
    """Fold an elementwise operation on scalars; None if the result is a NaN whose payload no Python scalar represents."""
    operands = [DEVICE.full((), value, dtype) for value, dtype in zip(values, types, strict=True)]
    made = np.asarray(meaning(op, attrs, types, result)(*operands))
    value = made.item()
    return value if splat(value, result).tobytes() == made.tobytes() else None
