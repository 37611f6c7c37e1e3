"""Rules of gather and scatter."""

from __future__ import annotations

from typing import Any

from tpuflow.jaxprs.compat import ClosedJaxpr
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.importers.jaxpr.registry import bound, enter, lowers
from tpuflow.lower.importers.jaxpr.rules.reductions import elementwise
from tpuflow.lower.operations.forms import UnsupportedForm
from tpuflow.lower.operations.gather import gather
from tpuflow.lower.operations.rows import SliceAxes
from tpuflow.lower.operations.scatter import scatter
from tpuflow.lower.operations.scatter_by import scatter_by
from tpuflow.lower.operations.window import Sizes

_SCATTERS = {"scatter": "set", "scatter-add": "add", "scatter-sub": "add", "scatter-mul": "mul", "scatter-min": "min", "scatter-max": "max"}


@lowers("gather")
def _gather(b: Builder, operand: Value, indices: Value, *, dimension_numbers: Any, slice_sizes: Sizes, mode: Any, fill_value: Any) -> Value:
    """The mode PROMISE_IN_BOUNDS clips, as XLA does."""
    _require_no_one_hot(mode, "fill")
    d = dimension_numbers
    batching = d.operand_batching_dims, d.start_indices_batching_dims
    axes = SliceAxes(d.offset_dims, d.collapsed_slice_dims, d.start_index_map, *batching)
    fill = 0 if fill_value is None else fill_value.item() if hasattr(fill_value, "item") else fill_value
    return gather(b, operand, indices, axes, slice_sizes, fill if mode.name == "FILL_OR_DROP" else None)


def _scatter(
    b: Builder, primitive: str, operand: Value, indices: Value, updates: Value, *, dimension_numbers: Any, mode: Any, update_jaxpr: Any,
    update_consts: Any = (), unique_indices: bool = False,
) -> Value:  # fmt: skip
    _require_no_one_hot(mode, "drop")
    axes = slice_axes(dimension_numbers)
    if primitive == "scatter" and update_jaxpr is not None and update_jaxpr.eqns:  # x.at[...].apply(f)
        body = elementwise(ClosedJaxpr(update_jaxpr, update_consts))
        (changed,) = scatter_by(b, body, [operand], indices, [updates], axes, clip=mode.name == "CLIP", apart=unique_indices)
        return changed
    changes = b.neg(updates) if primitive == "scatter-sub" else updates
    return scatter(b, operand, indices, changes, axes, _SCATTERS[primitive], clip=mode.name == "CLIP")


def slice_axes(numbers: Any) -> SliceAxes:
    """A scatter's dimension numbers as `SliceAxes`."""
    batching = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    return SliceAxes(numbers.update_window_dims, numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims, *batching)


enter({primitive: bound(_scatter, primitive) for primitive in _SCATTERS})


def _require_no_one_hot(mode: Any, other: str) -> None:
    if mode.name == "ONE_HOT":
        raise UnsupportedForm(f"mode='one_hot'; use 'clip' or {other!r}")
