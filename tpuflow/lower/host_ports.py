"""Inputs and outputs that lie in the host's memory: a graph says so by what it does with them first and last."""

from __future__ import annotations

from collections.abc import Iterable

from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.memories import HOST_INPUT, PUT, TO_HOST


def with_host_ports(graph: Graph, inputs: Iterable[bool] = (), outputs: Iterable[bool] = ()) -> Graph:
    """The graph of a program that has some inputs at the host when it starts, and puts some outputs there; none of those left out."""
    marks = {v: Node(HOST_INPUT, (v,), (Value(v.type, v.name),)) for v, there in zip(graph.inputs, inputs, strict=False) if there}
    begun = {v: node.result for v, node in marks.items()}
    nodes = [*marks.values()]
    for node in graph.nodes:
        nodes.append(node if begun.keys().isdisjoint(node.inputs) else node.on(tuple(begun.get(v, v) for v in node.inputs), node.results))
    ends = [begun.get(v, v) for v in graph.outputs]
    for i in (i for i, there in enumerate(outputs) if there):
        nodes.append(Node(PUT, (ends[i],), (Value(ends[i].type, ends[i].name),), TO_HOST))
        ends[i] = nodes[-1].result
    return Graph(graph.name, graph.inputs, tuple(nodes), tuple(ends), graph.input_names, graph.output_names)
