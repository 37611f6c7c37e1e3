"""Rules of collectives, as XLA's partitioner makes them: devices in groups by their numbers, which are axes of the module's mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tpuflow.dtypes import PRED, S32, U32
from tpuflow.isa.meshes import axes_ordered, places
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.importers.stablehlo.walk import PLANEWISE, RULES, Region
from tpuflow.lower.operations import collectives
from tpuflow.lower.operations.collectives import Group
from tpuflow.lower.operations.forms import UnsupportedForm
from tpuflow.lower.operations.reductions import reduce

_REDUCERS = {"add(a, b)": "add", "maximum(a, b)": "max", "minimum(a, b)": "min"}
"""Text of a reducer (`Region.expressions`) -> the device's reducer."""
_TRUTH = {"add(a, b)": "max", "or(a, b)": "max", "multiply(a, b)": "min", "and(a, b)": "min"} | _REDUCERS
"""The same for reducers of preds, which are reduced as the integers 0 and 1."""
_GATHERED = {"multiply(a, b)": "mul", "or(a, b)": "or", "and(a, b)": "and", "xor(a, b)": "xor"}
"""Reducers that no collective of the device has -> reductions of what an all-gather collects."""

PLANEWISE.update(f"stablehlo.{name}" for name in ("all_gather", "all_reduce", "all_to_all", "collective_permute", "reduce_scatter"))


@dataclass(frozen=True, slots=True)
class Members:
    """The groups of a collective: chips that differ only along the mesh axes of `group`.

    The device orders a group's chips row-major along these axes. Where the module's `replica_groups` list them in another order,
    `renumbering` has for every chip (its id, the id of the chip at its place in the device's order); else it is empty.
    """

    group: Group
    renumbering: tuple[tuple[int, int], ...] = ()

    def in_group_order(self, b: Builder, x: Value) -> Value:
        """x permuted between chips, so that the device's order of a group is the module's."""
        return _permuted(b, x, np.array(self.renumbering)) if self.renumbering else x

    def in_device_order(self, b: Builder, x: Value) -> Value:
        """A result permuted back: the inverse of `in_group_order`."""
        return _permuted(b, x, np.array(self.renumbering)[:, ::-1]) if self.renumbering else x


def _members(b: Builder, groups: Any, channel_handle: Any) -> Members:
    """The mesh axes that `replica_groups` run over, and how their order differs from the device's."""
    if not isinstance(groups, np.ndarray):
        raise UnsupportedForm(f"its groups of devices are not given as numbers ({groups})")
    if groups.size == 1:
        return Members(Group((), ()))
    _check_mesh(b)
    if channel_handle is None:
        raise UnsupportedForm("it is between replicas; a module for several devices has one replica of several partitions here")
    found = axes_ordered(groups, b.mesh)
    if found is None:
        raise UnsupportedForm(
            f"its groups of devices, {groups.tolist()}, are neither axes of the mesh {dict(b.mesh)} nor parts into which they divide; cut "
            "arrays over whole axes"
        )
    names, ordered = found
    renumbering = zip(groups.ravel().tolist(), ordered.ravel().tolist(), strict=True)
    return Members(Group.of(b.mesh, names), () if (groups == ordered).all() else tuple(renumbering))


def _check_mesh(b: Builder) -> None:
    if not b.mesh:
        raise UnsupportedForm(
            "it is between devices of a mesh that the module does not name. Compile the function that the module comes from with "
            "tpuflow.jit and its shardings, which says what the mesh is"
        )


@RULES.lowers("stablehlo.all_reduce")
def _all_reduce(b: Builder, *operands: Value, replica_groups: Any, regions: tuple[Region], channel_handle: Any = None) -> tuple[Value, ...]:
    group, (text,) = _members(b, replica_groups, channel_handle).group, regions[0].expressions()
    return tuple(_reduced(b, x, text, group) for x in operands)


def _reduced(b: Builder, x: Value, text: str, group: Group) -> Value:
    if x.dtype == PRED and text in _TRUTH:
        return b.convert(collectives.all_reduce(b, _TRUTH[text], b.convert(x, S32), group), PRED)
    if text in _GATHERED and group.chips > 1:
        return reduce(b, _GATHERED[text], collectives.all_gather(b, x, group, 0, tiled=False), (0,))
    return collectives.all_reduce(b, _reducer(text), x, group)


@RULES.lowers("stablehlo.reduce_scatter")
def _reduce_scatter(
    b: Builder, x: Value, *, scatter_dimension: int, replica_groups: Any, regions: tuple[Region], channel_handle: Any = None
) -> Value:
    members, (text,) = _members(b, replica_groups, channel_handle), regions[0].expressions()
    return members.in_device_order(b, collectives.reduce_scatter(b, _reducer(text), x, members.group, scatter_dimension, tiled=True))


def _reducer(text: str) -> str:
    if text not in _REDUCERS:
        raise UnsupportedForm(f"it combines by {text or 'a longer computation'}; between chips there are sums, the greatest and the least")
    return _REDUCERS[text]


@RULES.lowers("stablehlo.all_gather")
def _all_gather(
    b: Builder, *operands: Value, all_gather_dim: int, replica_groups: Any, channel_handle: Any = None
) -> tuple[Value, ...]:  # fmt: skip
    members = _members(b, replica_groups, channel_handle)
    return tuple(collectives.all_gather(b, members.in_group_order(b, x), members.group, all_gather_dim, tiled=True) for x in operands)


@RULES.lowers("stablehlo.all_to_all")
def _all_to_all(
    b: Builder, *operands: Value, split_dimension: int, concat_dimension: int, replica_groups: Any, channel_handle: Any = None
) -> tuple[Value, ...]:
    members = _members(b, replica_groups, channel_handle)
    sent = [collectives.all_to_all(b, members.in_group_order(b, x), members.group, split_dimension, concat_dimension) for x in operands]
    return tuple(members.in_device_order(b, x) for x in sent)


@RULES.lowers("stablehlo.collective_broadcast")
def _collective_broadcast(b: Builder, x: Value, *, replica_groups: Any, channel_handle: Any = None) -> Value:
    """Every chip of a group gets the array of its first one."""
    members = _members(b, replica_groups, channel_handle)
    if members.group.chips == 1:
        return x
    whole = collectives.all_gather(b, members.in_group_order(b, x), members.group, 0, tiled=False)
    return b.reshape(b.slice_axis(whole, 0, 0, 1), x.shape)


@RULES.lowers("stablehlo.collective_permute")
def _collective_permute(b: Builder, x: Value, *, source_target_pairs: Any, channel_handle: Any = None) -> Value:
    _check_mesh(b)
    if channel_handle is None:
        raise UnsupportedForm("it is between replicas; a module for several devices has one replica of several partitions here")
    return _permuted(b, x, np.asarray(source_target_pairs).reshape(-1, 2))


def _permuted(b: Builder, x: Value, pairs: np.ndarray) -> Value:
    """Collective-permute along only those mesh axes that the pairs move over, if the pairs are alike at every place of the other axes; else
    over all axes of the mesh.
    """
    moved = [name for name in b.mesh if (places(b.mesh, [name])[pairs] @ [1, -1]).any()]
    others = places(b.mesh, [name for name in b.mesh if name not in moved])
    rows = {int(o): sorted(map(tuple, places(b.mesh, moved)[pairs[others[pairs[:, 0]] == o]].tolist())) for o in np.unique(others)}
    same = list(rows.values())
    if moved and same.count(same[0]) == len(same):
        return collectives.collective_permute(b, x, Group.of(b.mesh, moved), same[0])
    return collectives.collective_permute(b, x, Group.of(b.mesh, list(b.mesh)), [(int(s), int(t)) for s, t in pairs])


@RULES.lowers("stablehlo.partition_id")
def _partition_id(b: Builder) -> Value:
    _check_mesh(b)
    return b.convert(collectives.position(b, Group.of(b.mesh, list(b.mesh))), U32)


@RULES.lowers("stablehlo.replica_id")
def _replica_id(b: Builder) -> Value:
    """Always 0: a module for several devices has one replica of several partitions."""
    _check_mesh(b)
    return b.scalar(0, U32)
