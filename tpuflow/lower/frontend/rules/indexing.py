"""Rules of gather and scatter in full generality, by whole rows of a matrix.

The operand is seen as [N, C]: its indexed axes, and those of which only a part is taken, count the N rows; the axes taken whole make up
the C columns. Each slice becomes as many rows as it has positions along the partly taken axes. A row number out of range marks a slice
that lies outside: such rows give the fill value, or are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpuflow.dtypes import PRED, S32, U8
from tpuflow.lower.frontend.registry import UnsupportedForm, lowers
from tpuflow.lower.frontend.rules.elementwise import as_index
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value

Axes = Sequence[int]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How slices of an operand become rows of a matrix.

    `sizes`: the slice along each operand axis (1 where it is collapsed). `indexed`: the operand axis of each index component.
    `batching`: pairs (operand axis, axis of the index array) that run together. `batch`: shape of the index array without components.
    """

    operand: TensorType
    sizes: tuple[int, ...]
    indexed: tuple[int, ...]
    batching: tuple[tuple[int, int], ...]
    batch: tuple[int, ...]

    @property
    def row_axes(self) -> tuple[int, ...]:
        """Operand axes that count rows."""
        paired = {axis for axis, _ in self.batching}
        return tuple(i for i, n in enumerate(self.operand.shape) if i in paired or self.sizes[i] != n)

    @property
    def column_axes(self) -> tuple[int, ...]:
        """Operand axes taken whole."""
        return tuple(i for i in range(len(self.operand.shape)) if i not in self.row_axes)

    @property
    def part_axes(self) -> tuple[int, ...]:
        """Row axes of which a slice takes several positions."""
        return tuple(i for i in self.row_axes if self.sizes[i] != 1)

    @property
    def matrix(self) -> tuple[int, int]:
        """[N, C]."""
        shape = self.operand.shape
        return math.prod(shape[i] for i in self.row_axes), math.prod(shape[i] for i in self.column_axes)

    @property
    def permutation(self) -> tuple[int, ...]:
        """Row axes before column axes."""
        return self.row_axes + self.column_axes

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The rows of all slices: [batch..., parts...]."""
        return self.batch + tuple(self.sizes[i] for i in self.part_axes)

    @property
    def slice_axes(self) -> tuple[int, ...]:
        """Operand axes in the order in which rows and columns hold a slice."""
        return self.part_axes + self.column_axes


def _component(b: Builder, indices: Value, i: int) -> Value:
    """[batch..., components] -> [batch...], s32."""
    axis = len(indices.shape) - 1
    return as_index(b, b.reshape(b.slice_axis(indices, axis, i, i + 1), indices.shape[:-1]))


def _starts(b: Builder, plan: _Plan, indices: Value, *, clip: bool) -> tuple[dict[int, Value], Value | None]:
    """Start of every slice along each indexed axis, in range; and which slices lay inside to begin with (None: all)."""
    starts: dict[int, Value] = {}
    inside: Value | None = None
    for i, axis in enumerate(plan.indexed):
        raw, last = _component(b, indices, i), plan.operand.shape[axis] - plan.sizes[axis]
        starts[axis] = b.min(b.max(raw, 0), max(last, 0))
        if not clip:
            here = b.and_(b.ge(raw, 0), b.le(raw, last))
            inside = here if inside is None else b.and_(inside, here)
    return starts, inside


def _rows(b: Builder, plan: _Plan, indices: Value, *, clip: bool) -> Value:
    """Row number of every row of every slice, s32[R]; -1 for slices outside."""
    starts, inside = _starts(b, plan, indices, clip=clip)
    rows = b.full(TensorType(S32, plan.row_shape), 0)
    stride = 1
    for axis in reversed(plan.row_axes):
        position = _position(b, plan, axis, starts)
        if position is not None:
            rows = b.add(rows, b.mul(position, stride) if stride != 1 else position)
        stride *= plan.operand.shape[axis]
    if inside is not None:
        rows = b.select(_over_rows(b, plan, inside), rows, -1)
    return b.reshape(rows, (math.prod(plan.row_shape),))


def _over_rows(b: Builder, plan: _Plan, x: Value) -> Value:
    """[batch...] -> [batch..., parts...]."""
    return b.broadcast(x, plan.row_shape, range(len(plan.batch)))


def _position(b: Builder, plan: _Plan, axis: int, starts: dict[int, Value]) -> Value | None:
    """Where along `axis` each row lies: start of its slice, place of its batch element, offset within the slice. None: 0 everywhere."""
    terms = [_over_rows(b, plan, starts[axis])] if axis in starts else []
    whole = TensorType(S32, plan.row_shape)
    terms += [b.iota(whole, place) for paired, place in plan.batching if paired == axis]
    if axis in plan.part_axes:
        terms.append(b.iota(whole, len(plan.batch) + plan.part_axes.index(axis)))
    return None if not terms else terms[0] if len(terms) == 1 else b.add(terms[0], terms[1])


def _as_matrix(b: Builder, plan: _Plan, operand: Value) -> Value:
    return b.reshape(b.transpose(operand, plan.permutation), plan.matrix)


def _inverse(permutation: Axes) -> list[int]:
    return sorted(range(len(permutation)), key=permutation.__getitem__)


def _batching(operand_axes: Axes, index_axes: Axes) -> tuple[tuple[int, int], ...]:
    return tuple(zip(operand_axes, index_axes, strict=True))


# --- gather -----------------------------------------------------------------------------------------------------------


@lowers("gather")
def _gather(b: Builder, operand: Value, indices: Value, *, dimension_numbers: Any, slice_sizes: Axes, mode: Any, fill_value: Any) -> Value:
    """Slices at `indices`. Promised in range means clipped, as XLA has it."""
    if mode.name == "ONE_HOT":
        raise UnsupportedForm("mode='one_hot'; use 'clip' or 'fill'")
    dims = dimension_numbers
    batching = _batching(dims.operand_batching_dims, dims.start_indices_batching_dims)
    plan = _Plan(operand.type, tuple(slice_sizes), tuple(dims.start_index_map), batching, indices.shape[:-1])
    removed = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
    fill = 0 if fill_value is None else fill_value.item() if hasattr(fill_value, "item") else fill_value
    clip = mode.name != "FILL_OR_DROP"
    if math.prod(plan.batch) == 1 and not batching:
        rows = _one_slice(b, plan, operand, indices, None if clip else fill)
    else:
        rows = b.take_rows(_as_matrix(b, plan, operand), _rows(b, plan, indices, clip=clip), fill)
    return _laid_out(b, plan, rows, removed, dims.offset_dims)


def _one_slice(b: Builder, plan: _Plan, operand: Value, indices: Value, fill: bool | int | float | None) -> Value:
    """A gather of one slice is a dynamic slice; in the order of rows and columns. `fill` (None: clip) if it lies outside."""
    known, inside = _starts(b, plan, indices, clip=fill is None)
    starts = [b.reshape(known[axis], ()) if axis in known else b.scalar(0, S32) for axis in range(len(plan.sizes))]
    piece = b.transpose(b.dynamic_slice(operand, starts, plan.sizes), plan.permutation)
    if inside is None or fill is None:
        return piece
    return b.select(b.splat(b.reshape(inside, ()), piece.shape), piece, fill)


def _laid_out(b: Builder, plan: _Plan, rows: Value, removed: set[int], offset_dims: Axes) -> Value:
    """[R, C] -> the gather's result: batch axes, with the slice's axes at `offset_dims`."""
    sizes = [plan.sizes[i] for i in plan.slice_axes]
    full = b.reshape(rows, (*plan.batch, *sizes))
    kept = [i for i in range(len(plan.sizes)) if i not in removed]
    full = b.reshape(full, (*plan.batch, *(plan.sizes[i] for i in plan.slice_axes if i not in removed), *_ones(plan, kept)))
    held = [i for i in plan.slice_axes if i not in removed] + [i for i in kept if i not in plan.slice_axes]
    rank = len(plan.batch) + len(kept)
    batch_dims = [i for i in range(rank) if i not in offset_dims]
    source = {place: i for i, place in enumerate(batch_dims)}
    source |= {place: len(plan.batch) + held.index(axis) for axis, place in zip(kept, offset_dims, strict=True)}
    return b.transpose(full, [source[i] for i in range(rank)])


def _ones(plan: _Plan, kept: Axes) -> list[int]:
    """Axes of size 1 that the slice keeps although rows are counted along them."""
    return [1 for i in kept if i not in plan.slice_axes]


# --- scatter ----------------------------------------------------------------------------------------------------------

_MODES = {"scatter": "set", "scatter-add": "add", "scatter-mul": "mul", "scatter-min": "min", "scatter-max": "max"}
_PRED_MODES = {"set": "set", "add": "max", "max": "max", "mul": "min", "min": "min"}


def _enter_scatter(primitive: str, op: str) -> None:
    @lowers(primitive)
    def rule(b: Builder, operand: Value, indices: Value, updates: Value, *, dimension_numbers: Any, mode: Any, update_jaxpr: Any) -> Value:
        _require_plain(primitive, update_jaxpr, mode)
        if operand.dtype == PRED:
            bytes_ = _scatter(b, b.convert(operand, U8), indices, b.convert(updates, U8), dimension_numbers, mode, _PRED_MODES[op])
            return b.convert(bytes_, PRED)
        return _scatter(b, operand, indices, updates, dimension_numbers, mode, op)


for _primitive, _op in _MODES.items():
    _enter_scatter(_primitive, _op)


@lowers("scatter-sub")
def _scatter_sub(
    b: Builder, operand: Value, indices: Value, updates: Value, *, dimension_numbers: Any, mode: Any, update_jaxpr: Any
) -> Value:
    _require_plain("scatter-sub", update_jaxpr, mode)
    return _scatter(b, operand, indices, b.neg(updates), dimension_numbers, mode, "add")


def _require_plain(primitive: str, update_jaxpr: Any, mode: Any) -> None:
    if mode.name == "ONE_HOT":
        raise UnsupportedForm("mode='one_hot'; use 'clip' or 'drop'")
    if primitive == "scatter" and update_jaxpr is not None and update_jaxpr.eqns:
        raise UnsupportedForm("x.at[...].apply(f) with repeated indices; write x.at[...].set(f(x[...]))")


def _scatter(b: Builder, operand: Value, indices: Value, updates: Value, dims: Any, mode: Any, op: str) -> Value:
    removed = {*dims.inserted_window_dims, *dims.operand_batching_dims}
    kept = [i for i in range(len(operand.shape)) if i not in removed]
    sizes = [1] * len(operand.shape)
    for axis, place in zip(kept, dims.update_window_dims, strict=True):
        sizes[axis] = updates.shape[place]
    batching = _batching(dims.operand_batching_dims, dims.scatter_indices_batching_dims)
    plan = _Plan(operand.type, tuple(sizes), tuple(dims.scatter_dims_to_operand_dims), batching, indices.shape[:-1])
    if not updates.type.elems:
        return operand
    rows = _rows(b, plan, indices, clip=mode.name == "CLIP")
    changed = b.scatter_rows(_as_matrix(b, plan, operand), rows, _updates_as_rows(b, plan, updates, kept, dims.update_window_dims), op)
    shape = [operand.shape[i] for i in plan.permutation]
    return b.transpose(b.reshape(changed, shape), _inverse(plan.permutation))


def _updates_as_rows(b: Builder, plan: _Plan, updates: Value, kept: Axes, window_dims: Axes) -> Value:
    """The updates with batch axes first and the slice's axes in the order of rows and columns: [R, C]."""
    place = dict(zip(kept, window_dims, strict=True))
    batch = [i for i in range(len(updates.shape)) if i not in window_dims]
    held = [place[i] for i in plan.slice_axes if i in place]
    ones = [place[i] for i in kept if i not in plan.slice_axes]
    moved = b.transpose(updates, (*batch, *held, *ones))
    return b.reshape(moved, (math.prod(plan.row_shape), plan.matrix[1]))
