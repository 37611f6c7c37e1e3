"""Products whose left operand has axes with two labels: its patches, times the right operand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from tpuflow.device.fast import lax_matmul
from tpuflow.device.fast.lax_rounding import Rounding
from tpuflow.dtypes import DType
from tpuflow.isa.instruction import Pair

Value = Any
Axes = Sequence[int]


def patches(a: Value, axis: int, outer: int, inner: int, stride: int, dilation: int) -> Value:
    """See `Arithmetic.patches`: slices of the axis side by side, one for each position of the shorter label."""
    by_inner = inner <= outer
    count, length = (inner, outer) if by_inner else (outer, inner)
    start, step = (dilation, stride) if by_inner else (stride, dilation)
    if 0 in (outer, inner):
        return lax.full((*a.shape[:axis], outer, inner, *a.shape[axis + 1 :]), 0, a.dtype)
    cuts = [lax.slice_in_dim(a, k * start, k * start + (length - 1) * step + 1, step, axis) for k in range(count)]
    where = axis + 1 if by_inner else axis
    return lax.concatenate([lax.expand_dims(cut, (where,)) for cut in cuts], where)


def convolve(
    rounding: Rounding, a: Value, b: Value, a_axes: Axes, b_axes: Axes, out_axes: Axes, pairs: Sequence[Pair], sizes: Mapping[int, int],
    dtype: DType, acc: DType,
) -> Value:  # fmt: skip
    """See `LaxArithmetic.convolve`."""
    labels = list(a_axes)
    for p in sorted(pairs, key=lambda p: -p.axis):
        a = patches(a, p.axis, sizes[labels[p.axis]], sizes[p.label], p.stride, p.dilation)
        labels.insert(p.axis + 1, p.label)
    return lax_matmul.matmul(rounding, a, b, labels, b_axes, out_axes, dtype, acc)
