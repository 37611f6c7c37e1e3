"""Schedule: kernels that overwrite a parameter run after those that still read it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.passes.base import Pass
from tpuflow.lower.passes.ordering import in_order


@dataclass(frozen=True, slots=True)
class Schedule(Pass):
    """Order nodes so that a value computed from a region input, of its type, can take its place in memory.

    Before: %w1 = fused %w, %g; %dx = dot %dy, %w.    After: %dx = dot %dy, %w; %w1 = fused %w, %g.
    Needs: fused graph.    Keeps: data dependence and the order of effects.    Never: adds or removes a node.
    """

    def __call__(self, graph: Graph) -> Graph:
        nodes = [self.map_regions(node) for node in graph.nodes]
        return replace(graph, nodes=tuple(in_order(nodes, _last_readers(graph, nodes))))


def _last_readers(graph: Graph, nodes: list[Node]) -> dict[Node, list[Node]]:
    """For every node that may overwrite a region input: the other nodes that read it."""
    outputs = set(graph.outputs)
    readers: dict[Value, list[Node]] = {v: [] for v in graph.inputs}
    for node in nodes:
        for value in node.inputs:
            if value in readers:
                readers[value].append(node)
    return {
        node: [other for v in node.inputs if v in readers and v.type in _output_types(node, outputs) for other in readers[v]]
        for node in nodes
    }


def _output_types(node: Node, outputs: set[Value]) -> list:
    return [v.type for v in node.results if v in outputs]
