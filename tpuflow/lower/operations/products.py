"""Products summed over axes, of operands of any types."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tpuflow.dtypes import BF16, F16, F32, PRED, S32, U32, DType
from tpuflow.dtypes import from_numpy as dtype_of
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.graph.products import DEFAULT
from tpuflow.lower.operations.storage import matrix_type

Axes = Sequence[int]


def dot_general(
    b: Builder, lhs: Value, rhs: Value, *,
    lhs_contract: Axes, rhs_contract: Axes, lhs_batch: Axes = (), rhs_batch: Axes = (),
    precision: str = DEFAULT, preferred: DType | None = None, entering: DType | None = None,
) -> Value:  # fmt: skip
    """[batch, lhs free, rhs free] in the preferred type, or else the operands' common one; operands are rounded to `entering`, if given."""
    result = result_dtype(lhs, rhs, preferred)
    if entering is not None:
        lhs, rhs = b.convert(lhs, entering), b.convert(rhs, entering)
    lhs, rhs = operands(b, lhs, rhs, result)
    return convert_result(b, b.dot(lhs, rhs, lhs_contract, rhs_contract, lhs_batch, rhs_batch, precision), result)


def result_dtype(lhs: Value, rhs: Value, preferred: DType | None) -> DType:
    """The preferred type if there is one, else the operands' common type."""
    return preferred if preferred is not None else common_dtype(lhs.dtype, rhs.dtype)


def common_dtype(x: DType, y: DType) -> DType:
    """The narrowest type that holds both; f16 with bf16, and a float with an integer, meet in f32."""
    if x == y:
        return x
    x, y = matrix_type(x), matrix_type(y)
    if {x, y} == {F16, BF16}:
        return F32
    if x.is_float != y.is_float:
        return F32
    if x.is_float:
        return F32 if F32 in (x, y) else x
    return dtype_of(np.promote_types(x.numpy, y.numpy))


def operands(b: Builder, lhs: Value, rhs: Value, result: DType) -> tuple[Value, Value]:
    """Operands in one type the matrix unit takes: their common one; f32 if integers give a float, s32 for truth values."""
    dtype = common_dtype(matrix_type(lhs.dtype), matrix_type(rhs.dtype))
    if dtype == PRED:
        dtype = S32
    if result.computed.is_float and not dtype.is_float:
        dtype = F32
    return b.convert(lhs, dtype), b.convert(rhs, dtype)


def convert_result(b: Builder, x: Value, dtype: DType) -> Value:
    """A dot's f32 or s32 in the result's type; u32 is the same bits as s32 (sums are modulo 2^32)."""
    return b.bitcast(x, U32) if dtype == U32 and x.dtype == S32 else b.convert(x, dtype)
