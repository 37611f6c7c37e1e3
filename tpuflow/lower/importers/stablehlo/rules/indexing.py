"""Rules of gather and scatter."""

from __future__ import annotations

from typing import Any

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.importers.stablehlo.walk import RULES, Region
from tpuflow.lower.operations.gather import gather
from tpuflow.lower.operations.rows import SliceAxes
from tpuflow.lower.operations.scatter import scatter
from tpuflow.lower.operations.scatter_by import scatter_by
from tpuflow.lower.operations.window import Sizes

_UPDATES = {
    "b": "set", "add(a, b)": "add", "subtract(a, b)": "add", "multiply(a, b)": "mul", "minimum(a, b)": "min", "maximum(a, b)": "max",
    "or(a, b)": "max", "and(a, b)": "min",
}  # fmt: skip
"""Text of a scatter's body (old element a, update b) -> the update mode."""
_ON_PRED = ("or(a, b)", "and(a, b)")


@RULES.lowers("stablehlo.gather")
def _gather(b: Builder, operand: Value, indices: Value, *, dimension_numbers: Any, slice_sizes: Sizes) -> Value:
    """Slices are moved so that they lie within the operand."""
    d = dimension_numbers
    batching = tuple(d.operand_batching_dims), tuple(d.start_indices_batching_dims)
    axes = SliceAxes(tuple(d.offset_dims), tuple(d.collapsed_slice_dims), tuple(d.start_index_map), *batching)
    return gather(b, operand, _vectors_last(b, indices, d.index_vector_dim), axes, slice_sizes)


@RULES.lowers("stablehlo.scatter")
def _scatter(
    b: Builder, *operands: Value, scatter_dimension_numbers: Any, regions: tuple[Region], unique_indices: bool = False
) -> Value | tuple[Value, ...]:
    """Updates that do not lie within the operand are dropped."""
    count = len(operands) // 2
    arrays, updates = operands[:count], operands[count + 1 :]
    places, axes = slices(b, operands[count], scatter_dimension_numbers)
    body = regions[0].expressions()[0] if count == 1 else ""
    if body not in _UPDATES or (body in _ON_PRED and arrays[0].dtype.kind != "pred"):
        return scatter_by(b, regions[0].elementwise, arrays, places, updates, axes, apart=unique_indices)
    changes = b.neg(updates[0]) if body == "subtract(a, b)" else updates[0]
    return scatter(b, arrays[0], places, changes, axes, _UPDATES[body])


def slices(b: Builder, indices: Value, numbers: Any) -> tuple[Value, SliceAxes]:
    """(indices with index vectors along the last axis, the dimension numbers as `SliceAxes`)."""
    batching = tuple(numbers.input_batching_dims), tuple(numbers.scatter_indices_batching_dims)
    window, inserted, indexed = numbers.update_window_dims, numbers.inserted_window_dims, numbers.scattered_dims_to_operand_dims
    axes = SliceAxes(tuple(window), tuple(inserted), tuple(indexed), *batching)
    return _vectors_last(b, indices, numbers.index_vector_dim), axes


def _vectors_last(b: Builder, indices: Value, axis: int) -> Value:
    """The indices with each vector along the last axis; an axis beyond the last means vectors of one."""
    if axis == len(indices.shape):
        return b.reshape(indices, (*indices.shape, 1))
    others = [i for i in range(len(indices.shape)) if i != axis]
    return b.transpose(indices, (*others, axis))
