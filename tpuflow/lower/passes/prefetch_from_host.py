"""PrefetchFromHost: what comes back from the host is fetched while kernels run before its first reader, as far as memory allows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from tpuflow.chips import Chip
from tpuflow.isa.collectives import MeshAxis
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.memories import START_PUT, is_fetch
from tpuflow.lower.passes.base import ChipPass
from tpuflow.lower.passes.fetched import before_readers
from tpuflow.lower.passes.node_seconds import node_times, put_seconds
from tpuflow.lower.passes.ordering import STARTS, held_bytes
from tpuflow.lower.passes.region_builder import bytes_of
from tpuflow.lower.passes.schedule import sizes_of
from tpuflow.lower.passes.unit_seconds import total_bytes


@dataclass(frozen=True, slots=True)
class PrefetchFromHost(ChipPass):
    """Start a move back to HBM so long before its first reader as it takes on the host's link, and wait for it there.

    The link brings one array after the other: one that is to be there when another begins starts earlier by that. None starts where it
    would be held when more is held than without any of them being early, but for those that a loop's body fetches for its next trip, for
    which `FetchAhead` has found room.
    Before: %3 = fused ...; %4 = device_put{hbm} %1; %5 = fused %4.
    After: %6 = start_put{hbm} %1; %3 = fused ...; %4 = await %6, %1; %5 = fused %4.
    Needs: the final order.    Keeps: every bit.    Never: holds more memory at the peak than there is room for.
    """

    mesh: tuple[MeshAxis, ...] = ()

    def on(self, chip: Chip, mesh: Sequence[MeshAxis] = ()) -> PrefetchFromHost:
        """The pass for programs of a mesh of chips."""
        return replace(self, chip=chip, mesh=tuple(mesh))

    def __call__(self, graph: Graph) -> Graph:
        return self._region(graph, frozenset())

    def _region(self, graph: Graph, carried: Collection[Value]) -> Graph:
        """A region, of which `carried` is what it hands to the next trip."""
        nodes = [node if not node.regions or node.op == "fused" else self._with_regions(node) for node in graph.nodes]
        graph = replace(graph, nodes=tuple(nodes))
        graph = replace(graph, nodes=tuple(before_readers(graph)))
        if not any(is_fetch(node) for node in graph.nodes):
            return graph
        return replace(graph, nodes=tuple(_Link(graph, self.chip, self.mesh, carried).started()))

    def _with_regions(self, node: Node) -> Node:
        return replace(node, regions=tuple(self._region(r, r.outputs if node.op == "loop" else ()) for r in node.regions))


@dataclass(slots=True)
class _Link:
    """The nodes of a region in their order, when each begins, what is held meanwhile, and what the host's link is asked for."""

    graph: Graph
    chip: Chip
    mesh: Sequence[MeshAxis]
    carried: Collection[Value]
    begins: list[float] = field(init=False)
    held: list[int] = field(init=False)
    most: int = field(init=False)

    def __post_init__(self) -> None:
        seconds = node_times(self.graph, self.chip, self.mesh).seconds
        taken = [0.0 if node.op in STARTS else seconds[node] for node in self.graph.nodes]
        self.begins = [0.0, *accumulate(taken)]
        self.held = held_bytes(self.graph.nodes, sizes_of(self.graph, self.chip))
        ahead = [node.result for node in self.graph.nodes if is_fetch(node) and node.result in self.carried]
        self.most = max(self.held) + total_bytes(ahead)

    def started(self) -> Iterator[Node]:
        """The nodes, with a start and a wait in the place of every fetch."""
        starts: dict[int, list[Node]] = defaultdict(list)
        waits: dict[Node, Node] = {}
        made = {v: i + 1 for i, node in enumerate(self.graph.nodes) for v in node.results}
        before = 0
        for at, begin in self._wanted():
            node = self.graph.nodes[at]
            moving = Value(node.result.type)
            there = max(made.get(value, 0) for value in node.inputs)
            before = self._earliest(at, begin, max(before, there), bytes_of(node.result.type))
            starts[before].append(replace(node, op=START_PUT, results=(moving,)))
            waits[node] = replace(node, op="await", inputs=(moving, node.inputs[0]), attrs={})
        for i, node in enumerate(self.graph.nodes):
            yield from starts[i]
            yield waits.get(node, node)

    def _wanted(self) -> list[tuple[int, float]]:
        """Where the fetches are, in order, and when each is to begin to be there in time, as are those after it."""
        found, free = [], math.inf
        for at, node in reversed(list(enumerate(self.graph.nodes))):
            if is_fetch(node):
                free = min(free, self.begins[at] - self.chip.dma_seconds) - put_seconds(node, self.chip)
                found.append((at, free))
        return found[::-1]

    def _earliest(self, at: int, begin: float, first: int, size: int) -> int:
        """Before which node a fetch starts whose result is read at another: not before its time, nor before the fetch ahead of it, and
        where there is room from then on."""
        while at > first and self.begins[at] > begin and self.held[at - 1] + size <= self.most:
            at -= 1
            self.held[at] += size
        return at
