"""MergeKernels: kernels over one iteration space that do not depend on one another become one kernel."""

from __future__ import annotations

import os.path
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tpuflow.chips import Chip
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.memories import at_host
from tpuflow.lower.passes.base import ChipPass
from tpuflow.lower.passes.region_builder import RegionBuilder, bytes_of, fits_on_chip, is_kernel
from tpuflow.lower.passes.unit_seconds import held_seconds, start_seconds

MAX_NODES = 2048
NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class MergeKernels(ChipPass):
    """Let maps (or reductions) over the same axes that lie side by side run as one, in the place of the last of them.

    Before: %4 = fused{select} %p, %0, %1; %5 = fused{select} %p, %2, %3.    After: %4, %5 = fused{select; select} %p, %0, %1, %2, %3.
    Needs: fused graph.    Keeps: every node of every region, so every bit.
    Never: raises the memory peak, or takes so many arrays that tiles get small.
    With `related`, only kernels that read the same large array or results of the same kernel. Without, none holds more bytes longer than
    the start of a kernel is worth, wherever the peak will be in the end: that is all that it saves.
    """

    related: bool = False

    def __call__(self, graph: Graph) -> Graph:
        nodes = [self.map_regions(node) for node in graph.nodes]
        while len(merged := _Merging(graph, nodes, self.chip, related=self.related).merged()) < len(nodes):
            nodes = merged
        return replace(graph, nodes=tuple(nodes))


@dataclass(slots=True, eq=False)
class _Bundle:
    """Kernels that will be merged, at the position `end` of the last one. `before`: the position of the first reader of their results,
    which limits how late they may run. `reads`, `makes`: their operands and results. `origins`: see `_Merging._origins`. `size`: nodes.
    """

    members: list[Node] = field(default_factory=list)
    end: int = 0
    before: int = NEVER
    reads: dict[Value, None] = field(default_factory=dict)
    makes: dict[Value, None] = field(default_factory=dict)
    origins: set[object] = field(default_factory=set)
    size: int = 0


class Memory:
    """Live bytes at every position of a region, and how a delay of kernels changes them; region inputs are live throughout."""

    def __init__(self, graph: Graph, nodes: Sequence[Node], spare_bytes: int = 0) -> None:
        """spare_bytes: by how much the peak of live bytes may grow."""
        self.last = dict.fromkeys(graph.inputs, len(nodes)) | dict.fromkeys(graph.outputs, len(nodes))
        for position, node in enumerate(nodes):
            for value in node.inputs:
                self.last[value] = max(self.last.get(value, 0), position)
        change, host = np.zeros(len(nodes) + 2, np.int64), at_host(nodes)
        for position, node in enumerate(nodes):
            for value in (v for v in node.results if v not in host):
                size = bytes_of(value.type)
                change[position] += size
                change[self.last.get(value, position) + 1] -= size
        self.used = np.cumsum(change)[:-1]
        self.most_bytes = int(self.used.max()) + spare_bytes

    def allows(self, reads: Iterable[Value], makes: Iterable[Value], old: int, new: int) -> bool:
        """Whether a kernel can be delayed from position `old` to `new` without exceeding the peak (and the spare bytes)."""
        start, added = self._added(reads, makes, old, new)
        return bool((self.used[start : new + 1] + added <= self.most_bytes)[added > 0].all())

    def added_bytes(self, reads: Iterable[Value], makes: Iterable[Value], old: int, new: int) -> int:
        """By how much that delay raises the bytes in use at most, at any position."""
        _, added = self._added(reads, makes, old, new)
        return int(added.max(initial=0))

    def delay(self, reads: Iterable[Value], makes: Iterable[Value], old: int, new: int) -> None:
        """Account for that delay."""
        reads = tuple(reads)
        start, added = self._added(reads, makes, old, new)
        self.used[start : new + 1] += added
        self.last.update((v, max(self.last[v], new)) for v in reads)

    def _added(self, reads: Iterable[Value], makes: Iterable[Value], old: int, new: int) -> tuple[int, np.ndarray]:
        """The first position at which the bytes in use change, and the change there and at those that follow."""
        longer = [v for v in reads if self.last[v] < new]
        start = min([old, *(self.last[v] + 1 for v in longer)])
        added = np.zeros(new + 1 - start, np.int64)
        for value in longer:
            added[self.last[value] + 1 - start :] += bytes_of(value.type)
        added[old - start : new - start] -= sum(bytes_of(v.type) for v in makes)
        return start, added


class _Merging:
    def __init__(self, graph: Graph, nodes: Sequence[Node], chip: Chip, *, related: bool) -> None:
        self.nodes, self.chip = nodes, chip
        self.related = related
        self.maker = {v: node for node in nodes for v in node.results}
        self.first: dict[Value, int] = {}
        for position, node in enumerate(nodes):
            for value in node.inputs:
                self.first.setdefault(value, position)
        self.memory = Memory(graph, nodes)

    def merged(self) -> list[Node]:
        """The nodes, every bundle as one node in the place of its last member, which is before all that reads any of its results."""
        bundles: dict[Any, list[_Bundle]] = {}
        at: dict[Node, _Bundle] = {}
        for position, node in enumerate(self.nodes):
            key = _space(node)
            if key is not None:
                at[node] = self._bundle_for(node, position, bundles.setdefault(key, []))
                self._add(node, position, at[node])
        ends = {bundle.members[-1]: bundle for bundle in at.values()}
        return [_one(ends[n].members) if n in ends else n for n in self.nodes if n not in at or n in ends]

    def _bundle_for(self, node: Node, position: int, bundles: list[_Bundle]) -> _Bundle:
        origins = self._origins(node)
        bundles[:] = [b for b in bundles if b.before > position]
        for bundle in bundles:
            if (not self.related or not origins.isdisjoint(bundle.origins)) and self._fits(node, bundle, position):
                return bundle
        bundles.append(_Bundle(end=position))
        return bundles[-1]

    def _fits(self, node: Node, bundle: _Bundle, position: int) -> bool:
        """Whether the bundle with the node is a kernel of a good size, its delay costs no memory at the peak, and elsewhere no more than it
        is worth."""
        values = dict.fromkeys((*bundle.reads, *bundle.makes, *node.inputs, *node.results))
        small = bundle.size + len(node.regions[0].nodes) <= MAX_NODES and fits_on_chip(v.type for v in values)
        delay = bundle.reads, bundle.makes, bundle.end, position
        if not small or not self.memory.allows(*delay):
            return False
        return self.related or held_seconds(self.memory.added_bytes(*delay), self.chip) <= start_seconds(self.chip)

    def _add(self, node: Node, position: int, bundle: _Bundle) -> None:
        self.memory.delay(bundle.reads, bundle.makes, bundle.end, position)
        bundle.members.append(node)
        bundle.end = position
        bundle.before = min([bundle.before, *(self.first.get(v, NEVER) for v in node.results)])
        bundle.reads.update(dict.fromkeys(node.inputs))
        bundle.makes.update(dict.fromkeys(node.results))
        bundle.origins |= self._origins(node)
        bundle.size += len(node.regions[0].nodes)

    def _origins(self, node: Node) -> set[object]:
        """The arrays of the kernel's own size that it reads, and the nodes that make them."""
        (region,) = node.regions
        space = max(v.type.elems for v in (*region.inputs, *region.outputs))
        read = [v for v in node.inputs if v.type.elems == space]
        return {*read, *(self.maker[v] for v in read if v in self.maker)}


def _space(node: Node) -> Any:
    """A key of the iteration space, equal for kernels that can be merged; None for those that cannot."""
    if not is_kernel(node, Kind.MAP, Kind.REDUCE):
        return None
    (region,) = node.regions
    if any(n.op == "join" for n in region.nodes) or not region.inputs:
        return None
    if is_kernel(node, Kind.MAP):
        return (Kind.MAP, region.outputs[0].shape) if region.outputs[0].shape else None
    reduction = next(n for n in region.nodes if n.op == "reduce")
    return Kind.REDUCE, reduction.inputs[0].shape, reduction.attrs["axes"]


def _one(members: Sequence[Node]) -> Node:
    """The members as one kernel."""
    if len(members) == 1:
        return members[0]
    builder = RegionBuilder()
    outputs = [v for node in members for v in builder.inline_region(node)]
    results = [v for node in members for v in node.results]
    return replace(builder.fused(members[0], outputs, results), scope=common_scope(members))


def common_scope(members: Sequence[Node]) -> str:
    """The innermost scope that contains all members with a scope, else the most common one."""
    scopes = [node.scope for node in members if node.scope]
    return (os.path.commonpath(scopes) or Counter(scopes).most_common(1)[0][0]) if scopes else ""
