"""Rules of gather and scatter."""

from __future__ import annotations

from typing import Any

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.importers.stablehlo.walk import RULES, Region
from tpuflow.lower.operations.forms import UnsupportedForm
from tpuflow.lower.operations.gather import gather
from tpuflow.lower.operations.rows import SliceAxes
from tpuflow.lower.operations.scatter import scatter
from tpuflow.lower.operations.window import Sizes

_UPDATES = {
    "b": "set", "add(a, b)": "add", "subtract(a, b)": "add", "multiply(a, b)": "mul", "minimum(a, b)": "min", "maximum(a, b)": "max",
    "or(a, b)": "max", "and(a, b)": "min",
}  # fmt: skip
"""What a scatter's body does with an old element a and an update b."""
_ON_PRED = ("or(a, b)", "and(a, b)")


@RULES.lowers("stablehlo.gather")
def _gather(b: Builder, operand: Value, indices: Value, *, dimension_numbers: Any, slice_sizes: Sizes) -> Value:
    """Slices are moved so that they lie within the operand."""
    d = dimension_numbers
    batching = tuple(d.operand_batching_dims), tuple(d.start_indices_batching_dims)
    axes = SliceAxes(tuple(d.offset_dims), tuple(d.collapsed_slice_dims), tuple(d.start_index_map), *batching)
    return gather(b, operand, _vectors_last(b, indices, d.index_vector_dim), axes, slice_sizes)


@RULES.lowers("stablehlo.scatter")
def _scatter(b: Builder, *operands: Value, scatter_dimension_numbers: Any, regions: tuple[Region]) -> Value:
    """Updates that do not lie within the operand are dropped."""
    if len(operands) != 3:
        raise UnsupportedForm(f"{len(operands) // 2} arrays at once; scatter into one at a time")
    operand, indices, updates = operands
    (body,) = regions[0].expressions()
    if body not in _UPDATES or (body in _ON_PRED and operand.dtype.kind != "pred"):
        raise UnsupportedForm(
            f"its update is {body or 'a longer computation'}; there are set, add, subtract, multiply, minimum and maximum. "
            "Instead of x.at[i].apply(f) write x.at[i].set(f(x[i]))"
        )
    changes = b.neg(updates) if body == "subtract(a, b)" else updates
    places, axes = slices(b, indices, scatter_dimension_numbers)
    return scatter(b, operand, places, changes, axes, _UPDATES[body])


def slices(b: Builder, indices: Value, numbers: Any) -> tuple[Value, SliceAxes]:
    """What a scatter's dimension numbers say, and the indices with each vector along the last axis."""
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
