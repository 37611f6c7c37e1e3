"""Range analysis of integers, so that indices that cannot be out of bounds are not clamped."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_dtypes

from tpuflow.dtypes import PRED, DType
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value

Range = tuple[int, int]

_MOST_STEPS = 4
"""The depth of operations to which a value is traced back."""
_MADE_BY: Mapping[str, Callable[[Range, Range], Range]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "mul": lambda x, y: (min(i * j for i in x for j in y), max(i * j for i in x for j in y)),
    "max": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "min": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
}


def range_of(b: Builder, x: Value, steps: int = _MOST_STEPS) -> Range:
    """(lowest, highest) value of x, of integers or preds: from the operations that compute it, else the bounds of its type."""
    if (number := b.known(x)) is not None:
        return (int(number), int(number))
    made = b.maker(x)
    if x in b.ranges or made is None or not steps:
        return b.ranges.get(x, _of_type(x.dtype))
    if made.op == "reshape" or (made.op == "convert" and not made.inputs[0].dtype.computed.is_float):
        return _fitting(range_of(b, made.inputs[0], steps - 1), x.dtype)
    if made.op in _MADE_BY:
        return _fitting(_MADE_BY[made.op](*(range_of(b, v, steps - 1) for v in made.inputs)), x.dtype)
    return _of_type(x.dtype)


def _of_type(dtype: DType) -> Range:
    if dtype == PRED:
        return (0, 1)
    bounds = ml_dtypes.iinfo(dtype.numpy)
    return (int(bounds.min), int(bounds.max))


def _fitting(found: Range, dtype: DType) -> Range:
    """The range, or the bounds of the type if it exceeds them and may wrap around."""
    low, high = _of_type(dtype)
    return found if low <= found[0] and found[1] <= high else (low, high)
