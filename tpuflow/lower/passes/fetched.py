"""What comes back from the host, and what is computed of it, right before who reads it: until then it would only take memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.memories import is_fetch
from tpuflow.lower.passes.analysis import effectful, producers


def before_readers(graph: Graph) -> list[Node]:
    """The nodes of a region with each that puts something back into HBM, and each that needs nothing else that nodes make, right before the
    first other one that needs it. So with what needs an item that the trip before has put back."""
    nodes = graph.nodes
    late = _late(nodes, _fetched_ahead(graph))
    makers = producers(late)
    ordered: dict[Node, None] = {}
    for node in nodes:
        if node not in late:
            ordered |= dict.fromkeys(sorted(_needed(node, makers, ordered), key=late.__getitem__))
            ordered[node] = None
    return list(ordered | dict.fromkeys(late))


def _fetched_ahead(graph: Graph) -> set[Value]:
    """The inputs of a loop's body that every trip puts back for the next."""
    if [v.type for v in graph.inputs] != [v.type for v in graph.outputs]:
        return set()
    back = {node.result for node in graph.nodes if is_fetch(node)}
    return {given for given, out in zip(graph.inputs, graph.outputs, strict=True) if out in back}


def _late(nodes: Sequence[Node], ahead: Iterable[Value]) -> dict[Node, int]:
    """The nodes that can wait for their readers, numbered."""
    late: dict[Node, int] = {}
    fetched, made = {*ahead}, set[Value]()
    for node in nodes:
        of_fetched = not effectful(node) and made.isdisjoint(node.inputs) and not fetched.isdisjoint(node.inputs)
        if is_fetch(node) or of_fetched:
            late[node] = len(late)
            fetched.update(node.results)
        else:
            made.update(node.results)
    return late


def _needed(node: Node, makers: Mapping[Value, Node], ordered: Mapping[Node, None]) -> set[Node]:
    """The late nodes that a node needs, and has not yet."""
    found: set[Node] = set()
    looked_at = [node]
    while looked_at:
        for value in looked_at.pop().inputs:
            maker = makers.get(value)
            if maker is not None and maker not in ordered and maker not in found:
                found.add(maker)
                looked_at.append(maker)
    return found
