"""Which values of a graph are at the host: what has been put there, until it is put back into HBM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import MappingProxyType

from tpuflow.lower.graph.graph import Graph, Node, Value

PUT, START_PUT, HOST_ARRAY, HOST_INPUT = "device_put", "start_put", "host_array", "host_input"
"""The move of an array between HBM and the host's memory, or of an item of what lies there; its start, whose result is on its way until an
`await`; room at the host for items; and an input that is at the host when the program starts, until `KeepOnHost` has settled who reads
it."""

TO_HOST, TO_HBM = MappingProxyType({"space": "host"}), MappingProxyType({"space": "hbm"})
"""Attributes of moves."""


def is_to_host(node: Node) -> bool:
    """Whether a node puts an array into the host's memory, or starts to."""
    return node.op in (PUT, START_PUT) and node.attrs["space"] == "host"


def is_fetch(node: Node) -> bool:
    """Whether a node puts an array back into HBM."""
    return node.op == PUT and node.attrs["space"] == "hbm"


def at_host(nodes: Iterable[Node], begun: Iterable[Value] = ()) -> set[Value]:
    """The values of some nodes, in order, and of their regions, that are at the host: those that are `begun` there, and what is told by
    what puts them there or back."""
    found: set[Value] = {*begun}
    for node in nodes:
        found.update(_put(node) if node.op in (PUT, START_PUT) else _others(node, found))
    return found


def _put(node: Node) -> tuple[Value, ...]:
    """Of what is put to the host, the result, and what it becomes an item of; of what is put back, where it comes from."""
    return (node.result, *node.inputs[1:2]) if is_to_host(node) else node.inputs[:1]


def _others(node: Node, found: set[Value]) -> Iterator[Value]:
    if node.op == HOST_ARRAY or (node.op == "await" and node.inputs[0] in found):
        yield from node.results
    if node.op != "fused":
        for region in node.regions:
            yield from _through(node, region, found)


def _through(node: Node, region: Graph, found: set[Value]) -> Iterator[Value]:
    """What a region has at the host, and the operands and results of the node that are carried there."""
    operands = node.inputs[len(node.inputs) - len(region.inputs) :]
    pairs = list(zip(operands, region.inputs, strict=True))
    inner = at_host(region.nodes, [value for operand, value in pairs if operand in found])
    yield from inner
    for i, (operand, value) in enumerate(pairs):
        if value in inner or (node.op == "loop" and region.outputs[i] in inner):
            yield from (operand, value)
            if node.op == "loop":
                yield node.results[i]
