"""Products summed over axes, of operands of any types."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tpuflow.dtypes import BF16, F16, F32, PRED, S32, U32, DType
from tpuflow.dtypes import from_numpy as dtype_of
from tpuflow.isa.contraction import Contraction, Labels
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.graph.products import DEFAULT, dot_contraction
from tpuflow.lower.operations.storage import matrix_type

Axes = Sequence[int]


def dot_general(
    b: Builder, lhs: Value, rhs: Value, *,
    lhs_contract: Axes, rhs_contract: Axes, lhs_batch: Axes = (), rhs_batch: Axes = (),
    precision: str = DEFAULT, preferred: DType | None = None, entering: DType | None = None,
) -> Value:  # fmt: skip
    """[batch, lhs free, rhs free] in the preferred type, or else the operands' common one; operands are rounded to `entering`, if given.

    What is no product of matrices is multiplied and summed elementwise.
    """
    result = result_dtype(lhs, rhs, preferred)
    if entering is not None:
        lhs, rhs = b.convert(lhs, entering), b.convert(rhs, entering)
    lhs, rhs = operands(b, lhs, rhs, result)
    contracted, batch = (tuple(lhs_contract), tuple(rhs_contract)), (tuple(lhs_batch), tuple(rhs_batch))
    whole = dot_contraction(len(lhs.shape), len(rhs.shape), *contracted, *batch)
    if _is_of_matrices(whole) or not (lhs.type.elems and rhs.type.elems):
        return convert_result(b, b.dot(lhs, rhs, *contracted, *batch, precision), result)
    return convert_result(b, _elementwise(b, lhs, rhs, whole), result)


def _is_of_matrices(whole: Contraction) -> bool:
    """Whether a product has rows, columns and something to sum: else it would fill one row or column of a matrix array, or its first level,
    and leave the others idle.

    A matter of axes, not of lengths or of the chip, so that the bits of a result do not depend on these. XLA's compilers do the same.
    """
    return bool(whole.rows and whole.columns and whole.contracted)


def _elementwise(b: Builder, lhs: Value, rhs: Value, whole: Contraction) -> Value:
    """A product's f32 or s32 as the products of elements, each rounded, and the vector unit's sum of them.

    The operand with more axes keeps its layout; the other one, and the result, are transposed to fit.
    """
    first, second = (whole.rhs, whole.lhs) if whole.columns else (whole.lhs, whole.rhs)
    space = tuple(dict.fromkeys((*first, *second))) if whole.contracted else whole.out
    sizes = whole.by_label(lhs.shape, rhs.shape)
    shape = tuple(sizes[x] for x in space)
    products = b.mul(*(_spread(b, _wide(b, x), labels, space, shape) for x, labels in ((lhs, whole.lhs), (rhs, whole.rhs))))
    left = [x for x in space if x in whole.out]
    sums = b.reduce("add", products, [axis for axis, x in enumerate(space) if x in whole.contracted])
    return b.transpose(sums, [left.index(x) for x in whole.out])


def _wide(b: Builder, x: Value) -> Value:
    """x in the type of a dot's result, in which products of 8 and 16 bits are exact."""
    return b.bitcast(x, S32) if x.dtype == U32 else b.convert(x, F32 if x.dtype.is_float else S32)


def _spread(b: Builder, x: Value, labels: Labels, space: Labels, shape: tuple[int, ...]) -> Value:
    """x, whose axes have these labels, along the axes of `space`, which has this shape."""
    order = sorted(range(len(labels)), key=lambda axis: space.index(labels[axis]))
    return b.broadcast(b.transpose(x, order), shape, sorted(map(space.index, labels)))


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
