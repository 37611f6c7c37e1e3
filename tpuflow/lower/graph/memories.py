"""Which values of a graph are at the host: what has been put there, until it is put back into HBM."""

from __future__ import annotations

from collections.abc import Iterable

from tpuflow.lower.graph.graph import Node, Value

PUT, START_PUT = "device_put", "start_put"
"""The move of an array between HBM and the host's memory, and its start, whose result is on its way until an `await`."""


def is_to_host(node: Node) -> bool:
    """Whether a node puts an array into the host's memory, or starts to."""
    return node.op in (PUT, START_PUT) and node.attrs["space"] == "host"


def is_fetch(node: Node) -> bool:
    """Whether a node puts an array back into HBM."""
    return node.op == PUT and node.attrs["space"] == "hbm"


def at_host(nodes: Iterable[Node]) -> set[Value]:
    """The values of some nodes, in order, that are at the host."""
    found: set[Value] = set()
    for node in nodes:
        if is_to_host(node) or (node.op == "await" and node.inputs[0] in found):
            found.update(node.results)
    return found
