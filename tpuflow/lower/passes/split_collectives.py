"""SplitCollectives: a collective is started as soon as it can be, and awaited when its result is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.passes.base import Pass


@dataclass(frozen=True, slots=True)
class SplitCollectives(Pass):
    """A start where the source is made, whose result is still on its way; and the wait, which holds the source too: so long it must stay.

    Before: %0 = fused ...; %1 = fused ...; %2 = collective %0.
    After: %0 = fused ...; %3 = start %0; %1 = fused ...; %2 = await %3, %0.
    Needs: fused graph.    Keeps: every bit.    Never: moves a wait; `Schedule` does, behind what hides it.
    """

    def __call__(self, graph: Graph) -> Graph:
        starts: dict[Value, list[Node]] = {}
        rest: list[Node] = []
        for node in graph.nodes:
            if node.op == "collective":
                start, wait = _split(node)
                starts.setdefault(node.inputs[0], []).append(start)
                rest.append(wait)
            else:
                rest.append(self.map_regions(node))
        return replace(graph, nodes=tuple(_started(graph, rest, starts))) if starts else replace(graph, nodes=tuple(rest))


def _split(node: Node) -> tuple[Node, Node]:
    moving = Value(node.result.type)
    return replace(node, op="start", results=(moving,)), replace(node, op="await", inputs=(moving, *node.inputs), attrs={})


def _started(graph: Graph, nodes: list[Node], starts: dict[Value, list[Node]]) -> Iterator[Node]:
    """The nodes with every start right behind the maker of what it sends."""
    for value in graph.inputs:
        yield from starts.get(value, ())
    for node in nodes:
        yield node
        for value in node.results:
            yield from starts.get(value, ())
