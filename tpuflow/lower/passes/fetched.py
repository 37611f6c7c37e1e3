"""What comes back from the host, and what is computed of it, right before who reads it: until then it would only take memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.graph.memories import is_fetch
from tpuflow.lower.passes.analysis import effectful, producers


def before_readers(nodes: Sequence[Node]) -> list[Node]:
    """The nodes with each that puts something back into HBM, and each that needs nothing else that nodes make, right before the first
    other one that needs it."""
    late = _late(nodes)
    makers = producers(late)
    ordered: dict[Node, None] = {}
    for node in nodes:
        if node not in late:
            ordered |= dict.fromkeys(sorted(_needed(node, makers, ordered), key=late.__getitem__))
            ordered[node] = None
    return list(ordered | dict.fromkeys(late))


def _late(nodes: Sequence[Node]) -> dict[Node, int]:
    """The nodes that can wait for their readers, numbered."""
    late: dict[Node, int] = {}
    fetched, made = set[Value](), set[Value]()
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
