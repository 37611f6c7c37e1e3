"""Between which numbers an integer is known to be, so that indices need not be moved into bounds that they cannot leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_dtypes

from tpuflow.dtypes import PRED, DType
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value

Range = tuple[int, int]

_MOST_STEPS = 4
"""How many operations back the making of a number is looked at."""
_MADE_BY: Mapping[str, Callable[[Range, Range], Range]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "mul": lambda x, y: (min(i * j for i in x for j in y), max(i * j for i in x for j in y)),
    "max": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "min": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
}


def range_of(b: Builder, x: Value, steps: int = _MOST_STEPS) -> Range:
    """The least and the largest number that x, integers or truth values, may be: from how it was made, or those of its type."""
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
    """The range, unless it leaves the type, in which numbers wrap around."""
    low, high = _of_type(dtype)
    return found if low <= found[0] and found[1] <= high else (low, high)
