"""f32 products on a matrix unit with 16-bit operands: each operand is split into a sum of 16-bit parts, whose products are added up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tpuflow.dtypes import BF16, F16, F32, DType
from tpuflow.isa.arithmetic import Arithmetic

Pass = tuple[int, int]
"""(part of the left operand, part of the right operand), numbered from the largest."""


@dataclass(frozen=True, slots=True)
class Split:
    """An operand is split into `parts` numbers of `dtype`, each the rounded remainder of those before it. `passes` are the products of
    parts that are computed, in the order in which they are added."""

    code: int
    dtype: DType
    parts: int
    passes: tuple[Pass, ...]


EXACT = "exact"
SPLITS: Mapping[str, Split] = {
    "bf16": Split(1, BF16, 1, ((0, 0),)),
    "bf16_x3": Split(2, BF16, 2, ((0, 1), (1, 0), (0, 0))),
    "bf16_x6": Split(3, BF16, 3, ((0, 2), (1, 1), (2, 0), (0, 1), (1, 0), (0, 0))),
    "f16": Split(4, F16, 1, ((0, 0),)),
}
"""XLA's ways to multiply f32 on a TPU: one pass at the default precision, three at HIGH, six at HIGHEST; and Ascend's."""

PRECISIONS = {EXACT: 0, **{name: row.code for name, row in SPLITS.items()}}

Multiply = Callable[[Any, Any, DType], Any]


def multiply_split(ar: Arithmetic, a: Any, b: Any, dtype: DType, precision: str, multiply: Multiply) -> Any:
    """The product of operands of `dtype`: `multiply(x, y, dtype)` of the operands themselves, or of their parts.

    The passes are added in f32, small ones first. Where the sum of all but the last is not finite it counts as zero: the remainder of an
    infinite operand is NaN, and the last pass alone is the product then.
    """
    if precision == EXACT:
        return multiply(a, b, dtype)
    row = SPLITS[precision]
    left, right = (_parts(ar, x, row) for x in (a, b))
    *small, main = (multiply(left[i], right[j], row.dtype) for i, j in row.passes)
    if not small:
        return main
    rest = functools.reduce(lambda x, y: ar.binary("add", x, y, F32), small)
    rest = ar.select(ar.is_finite(rest, F32), rest, ar.full(rest.shape, 0, F32), F32)
    return ar.binary("add", rest, main, F32)


def _parts(ar: Arithmetic, x: Any, row: Split) -> list[Any]:
    """Parts of an f32 operand, largest first."""
    parts = [ar.convert(x, F32, row.dtype)]
    while len(parts) < row.parts:
        x = ar.binary("sub", x, ar.convert(parts[-1], row.dtype, F32), F32)
        parts.append(ar.convert(x, F32, row.dtype))
    return parts
