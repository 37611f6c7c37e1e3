"""Schedule: kernels that overwrite a parameter run after those that still read it, kernels that free memory as soon as they can."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from tpuflow.chips import Chip
from tpuflow.isa.collectives import MeshAxis
from tpuflow.lower.emit import overwritable
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.memories import at_host
from tpuflow.lower.passes.base import ChipPass
from tpuflow.lower.passes.fetched import before_readers
from tpuflow.lower.passes.node_seconds import node_times
from tpuflow.lower.passes.ordering import RECEIVED, STARTS, VIEWS, Sizes, in_order
from tpuflow.lower.passes.unit_seconds import FILLED_SHARE, total_bytes


@dataclass(frozen=True, slots=True)
class Schedule(ChipPass):
    """Order nodes so that a value computed from a region input, of its type, can take its place in memory, and little is held long.

    A gradient goes into its parameter's update as soon as nothing else reads what it is made of, rather than where the update was written.
    What is sent between chips, or to the host, is started as soon as it is made, and waited for, so that its memory is free, once the
    kernels that ran since have hidden it; before that where nothing else is left to do, or the chip's memory would be too small. What
    comes back from the host does so as late as its first reader lets it.

    Before: %w1 = fused %w, %g; %dx = dot %dy, %w.    After: %dx = dot %dy, %w; %w1 = fused %w, %g.
    Needs: fused graph.    Keeps: data dependence and the order of effects.    Never: adds or removes a node.
    """

    mesh: tuple[MeshAxis, ...] = ()

    def on(self, chip: Chip, mesh: Sequence[MeshAxis] = ()) -> Schedule:
        """The pass for programs of a mesh of chips."""
        return replace(self, chip=chip, mesh=tuple(mesh))

    def __call__(self, graph: Graph) -> Graph:
        graph = replace(graph, nodes=tuple(map(self.map_regions, graph.nodes)))
        nodes = before_readers(graph)
        graph = replace(graph, nodes=tuple(nodes))
        replaced = _replaced(graph)
        times = node_times(graph, self.chip, self.mesh) if any(node.op in STARTS for node in nodes) else None
        return replace(graph, nodes=tuple(in_order(nodes, _last_readers(graph, replaced), sizes_of(graph, self.chip), times)))


def sizes_of(graph: Graph, chip: Chip) -> Sizes:
    """What an order of a region's nodes does to a chip's memory."""
    replaced, inputs, host = _replaced(graph), set(graph.inputs), at_host(graph.nodes)
    room_bytes = FILLED_SHARE * chip.available_hbm_bytes - total_bytes(v for v in graph.inputs if v not in host)
    made = {node: _made_bytes(node, replaced[node], inputs, host) for node in graph.nodes}
    return Sizes(made, frozenset(graph.outputs), room_bytes, host)


def _replaced(graph: Graph) -> dict[Node, tuple[Value, ...]]:
    """For every node the region inputs, or views of them, whose places its results may take."""
    outputs, places = set(graph.outputs), _carried(graph)
    return {
        node: tuple(places[v] for v in node.results if v in places) if node.op == "start" else _overwritable(node, outputs)
        for node in graph.nodes
    }


def _carried(graph: Graph) -> dict[Value, Value]:
    """Of what leaves a loop's body, and what is received for it: the region input that it takes the place of in the next trip."""
    if [v.type for v in graph.inputs] != [v.type for v in graph.outputs]:
        return {}
    places = dict(zip(graph.outputs, graph.inputs, strict=True))
    for node in reversed(graph.nodes):
        if node.op in RECEIVED:
            places.update((v, places[result]) for v, result in zip(node.inputs, node.results, strict=False) if result in places)
    return places


def _last_readers(graph: Graph, replaced: Mapping[Node, Sequence[Value]]) -> dict[Node, list[Node]]:
    """For every node that may take the place of a region input: the other nodes that read it."""
    origin: dict[Value, Value] = {v: v for v in graph.inputs}
    readers: dict[Value, list[Node]] = {v: [] for v in graph.inputs}
    for node in graph.nodes:
        for value in node.inputs:
            if value in origin:
                readers[origin[value]].append(node)
        if node.op in VIEWS:
            origin.update((result, origin[value]) for value, result in zip(node.inputs, node.results, strict=True) if value in origin)
    return {node: [other for v in replaced[node] if v in readers for other in readers[v]] for node in graph.nodes}


def _made_bytes(node: Node, replaced: Sequence[Value], inputs: Container[Value], host: Container[Value]) -> int:
    """Bytes of HBM of a node's results, but for what is in memory already, and those that take a region input's place."""
    made = total_bytes(v for v in node.results if v not in host)
    return 0 if node.op in RECEIVED else made - total_bytes(v for v in replaced if v in inputs and v not in host)


def _overwritable(node: Node, outputs: Container[Value]) -> tuple[Value, ...]:
    """Operands that a result which leaves the graph may replace."""
    types = {v.type for v in node.results if v in outputs}
    replaced = overwritable(node) if types else frozenset()
    return tuple(v for v in node.inputs if v in replaced and v.type in types)
