"""Inputs and outputs that lie in the host's memory: a graph says so by what it does with them first and last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.memories import HOST_INPUT, PUT, TO_HBM, TO_HOST


def with_host_ports(graph: Graph, inputs: Iterable[bool] = (), outputs: Iterable[bool] = ()) -> Graph:
    """The graph of a program that has some inputs at the host when it starts, and puts some outputs there; none of those left out."""
    begun = _read_through(graph, inputs, Node(HOST_INPUT, (), ()))
    puts = {
        i: Node(PUT, (v,), (Value(v.type),), TO_HOST) for i, (v, there) in enumerate(zip(begun.outputs, outputs, strict=False)) if there
    }
    ends = tuple(puts[i].result if i in puts else v for i, v in enumerate(begun.outputs))
    return replace(begun, nodes=(*begun.nodes, *puts.values()), outputs=ends)


def with_fetches(graph: Graph, inputs: Iterable[bool]) -> Graph:
    """The graph with some inputs put into HBM before anything reads them."""
    return _read_through(graph, inputs, Node(PUT, (), (), TO_HBM))


def _read_through(graph: Graph, chosen: Iterable[bool], move: Node) -> Graph:
    """The graph whose nodes and outputs have what `move` makes of the chosen inputs, in place of these."""
    moves = {v: move.on((v,), (Value(v.type, v.name),)) for v, is_chosen in zip(graph.inputs, chosen, strict=False) if is_chosen}
    new = {v: node.result for v, node in moves.items()}

    def renamed(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return values if new.keys().isdisjoint(values) else tuple(new.get(v, v) for v in values)

    nodes = (node.on(renamed(node.inputs), node.results) for node in graph.nodes)
    return replace(graph, nodes=(*moves.values(), *nodes), outputs=renamed(graph.outputs)) if moves else graph
