"""The rules of scatter in full generality: set, add, subtract, multiply, minimum, maximum."""

from __future__ import annotations

import math
from typing import Any

from tpuflow.dtypes import PRED, S32, U8
from tpuflow.lower.frontend.registry import UnsupportedForm, lowers
from tpuflow.lower.frontend.rules.reductions import combine
from tpuflow.lower.frontend.rules.rows import Axes, Plan, as_matrix, batching_pairs, inverse, place_permutation, places, rows, starts
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value

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
    batching = batching_pairs(dims.operand_batching_dims, dims.scatter_indices_batching_dims)
    plan = Plan(operand.type, tuple(sizes), tuple(dims.scatter_dims_to_operand_dims), batching, indices.shape[:-1])
    if not updates.type.elems:
        return operand
    clip = mode.name == "CLIP"
    if plan.one_slice:
        return _one_slice(b, plan, operand, indices, updates, op, clip=clip)
    if plan.place_axis is not None:
        return _at_places(b, plan, operand, indices, updates, op, clip=clip)
    changes = _updates_as_rows(b, plan, updates, kept, dims.update_window_dims)
    changed = b.scatter_rows(as_matrix(b, plan, operand), rows(b, plan, indices, clip=clip), changes, op)
    return _back(b, changed, operand, plan.permutation)


def _combined(b: Builder, op: str, old: Value, new: Value) -> Value:
    return new if op == "set" else combine(b, op, old, new)


def _back(b: Builder, x: Value, operand: Value, permutation: Axes) -> Value:
    """A changed matrix in the operand's shape again."""
    return b.transpose(b.reshape(x, [operand.shape[i] for i in permutation]), inverse(permutation))


def _one_slice(b: Builder, plan: Plan, operand: Value, indices: Value, updates: Value, op: str, *, clip: bool) -> Value:
    """A scatter of one slice changes a dynamic slice."""
    found, inside = starts(b, plan, indices, clip=clip)
    first = [b.reshape(found[axis], ()) if axis in found else b.scalar(0, S32) for axis in range(len(plan.sizes))]
    old = b.dynamic_slice(operand, first, plan.sizes)
    new = _combined(b, op, old, b.reshape(updates, plan.sizes))
    if inside is not None:
        new = b.select(b.splat(b.reshape(inside, ()), new.shape), new, old)
    return b.dynamic_update_slice(operand, new, first)


def _at_places(b: Builder, plan: Plan, operand: Value, indices: Value, updates: Value, op: str, *, clip: bool) -> Value:
    """One entry of each of many rows: chosen by comparing positions, without indexed stores."""
    matrix, here, inside = places(b, plan, operand, indices, clip=clip)
    new = b.broadcast(b.reshape(updates, matrix.shape[:1]), matrix.shape, (0,))
    chosen = here if inside is None else b.and_(here, inside)
    return _back(b, b.select(chosen, _combined(b, op, matrix, new), matrix), operand, place_permutation(plan))


def _updates_as_rows(b: Builder, plan: Plan, updates: Value, kept: Axes, window_dims: Axes) -> Value:
    """The updates with batch axes first and the slice's axes in the order of rows and columns: [R, C]."""
    place = dict(zip(kept, window_dims, strict=True))
    batch = [i for i in range(len(updates.shape)) if i not in window_dims]
    held = [place[i] for i in plan.slice_axes if i in place]
    ones = [place[i] for i in kept if i not in plan.slice_axes]
    moved = b.transpose(updates, (*batch, *held, *ones))
    return b.reshape(moved, (math.prod(plan.row_shape), plan.matrix[1]))
