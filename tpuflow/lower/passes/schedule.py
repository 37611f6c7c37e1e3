"""Schedule: kernels that overwrite a parameter run after those that still read it, kernels that free memory as soon as they can."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tpuflow.lower.emit import overwritable
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.passes.base import Pass
from tpuflow.lower.passes.ordering import Sizes, in_order


@dataclass(frozen=True, slots=True)
class Schedule(Pass):
    """Order nodes so that a value computed from a region input, of its type, can take its place in memory, and little is held long.

    A gradient goes into its parameter's update as soon as nothing else reads what it is made of, rather than where the update was written.
    What is on its way between chips is waited for when nothing else is left to do.

    Before: %w1 = fused %w, %g; %dx = dot %dy, %w.    After: %dx = dot %dy, %w; %w1 = fused %w, %g.
    Needs: fused graph.    Keeps: data dependence and the order of effects.    Never: adds or removes a node.
    """

    def __call__(self, graph: Graph) -> Graph:
        nodes = [self.map_regions(node) for node in graph.nodes]
        inputs, outputs = set(graph.inputs), frozenset(graph.outputs)
        replaced = {node: _overwritable(node, outputs) for node in nodes}
        sizes = Sizes({node: _made_bytes(node, inputs, over) for node, over in replaced.items()}, outputs)
        return replace(graph, nodes=tuple(in_order(nodes, _last_readers(graph, nodes, replaced) | _independent(nodes), sizes)))


def _last_readers(graph: Graph, nodes: list[Node], replaced: Mapping[Node, list[Value]]) -> dict[Node, list[Node]]:
    """For every node that may overwrite a region input, by the operands that nodes may replace: the other nodes that read it."""
    origin: dict[Value, Value] = {v: v for v in graph.inputs}
    readers: dict[Value, list[Node]] = {v: [] for v in graph.inputs}
    for node in nodes:
        for value in node.inputs:
            if value in origin:
                readers[origin[value]].append(node)
        if node.op in ("reshape", "barrier"):
            origin.update((result, origin[value]) for value, result in zip(node.inputs, node.results, strict=True) if value in origin)
    return {node: [other for v in over if v in readers for other in readers[v]] for node, over in replaced.items()}


def _independent(nodes: list[Node]) -> dict[Node, list[Node]]:
    """For every wait the nodes that do not need it: they run while what it waits for is on its way."""
    made: dict[Value, int] = {}
    needs: dict[Node, int] = {}
    waits = [node for node in nodes if node.op == "await"]
    for node in nodes:
        own = 1 << waits.index(node) if node.op == "await" else 0
        needs[node] = own | functools.reduce(operator.or_, (made.get(v, 0) for v in node.inputs), 0)
        made.update(dict.fromkeys(node.results, needs[node]))
    return {wait: [node for node in nodes if not needs[node] >> n & 1] for n, wait in enumerate(waits)}


def _made_bytes(node: Node, inputs: set[Value], replaced: Sequence[Value]) -> int:
    """Bytes of a node's results, but for those that may take the place of a region input that is `replaced`."""
    saved = [v for v in replaced if v in inputs]
    return sum(v.type.elems * v.dtype.bytes for v in node.results) - sum(v.type.elems * v.dtype.bytes for v in saved)


def _overwritable(node: Node, outputs: frozenset[Value]) -> list[Value]:
    """Operands that a result which leaves the graph may replace."""
    types = {v.type for v in node.results if v in outputs}
    replaced = overwritable(node) if types else frozenset()
    return [v for v in node.inputs if v in replaced and v.type in types]
