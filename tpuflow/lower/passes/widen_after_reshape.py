"""WidenAfterReshape: an array that only a reshape keeps from its readers is stored in its narrow type, and widened by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tpuflow.lower.graph.graph import Graph, Node, TensorType, Value
from tpuflow.lower.graph.ops import ELEMENTWISE
from tpuflow.lower.passes.analysis import producers
from tpuflow.lower.passes.base import Pass


@dataclass(frozen=True, slots=True)
class WidenAfterReshape(Pass):
    """Move a conversion to a wider type behind the reshape of its result, where all that reads this can convert as it reads.

    Before: %1 = convert %0; %2 = reshape %1; %3 = mul %2, %x.    After: %1 = reshape %0; %2 = convert %1; %3 = mul %2, %x.
    A kernel ends at a reshape that no other rule absorbs; so it stores, and its readers load, the narrower array.
    Needs: simplified graph, no fused nodes.    Keeps: every bit.    Never: converts what something else reads in its wide type.
    """

    def __call__(self, graph: Graph) -> Graph:
        nodes = [self.map_regions(node) for node in graph.nodes]
        made, readers = producers(nodes), _readers(nodes)
        widened = {n.result: made[n.inputs[0]] for n in nodes if _reads_widened(n, made, readers, graph.outputs)}
        return replace(graph, nodes=tuple(new for node in nodes for new in _rewritten(node, widened, readers)))


def _readers(nodes: Sequence[Node]) -> dict[Value, list[Node]]:
    found: dict[Value, list[Node]] = {}
    for node in nodes:
        for value in node.inputs:
            found.setdefault(value, []).append(node)
    return found


def _reads_widened(node: Node, made: Mapping[Value, Node], readers: Mapping[Value, Sequence[Node]], outputs: Sequence[Value]) -> bool:
    """Whether a node is a reshape of a conversion to a wider type that nothing else reads, and itself is read by what may convert it."""
    convert = made.get(node.inputs[0]) if node.op == "reshape" else None
    if convert is None or convert.op != "convert" or convert.inputs[0].dtype.bytes >= convert.result.dtype.bytes:
        return False
    converts = all(n.op in ELEMENTWISE or n.op == "reduce" for n in readers.get(node.result, ()))
    return converts and readers[convert.result] == [node] and not {convert.result, node.result}.intersection(outputs)


def _rewritten(node: Node, widened: Mapping[Value, Node], readers: Mapping[Value, Sequence[Node]]) -> tuple[Node, ...]:
    """What takes the place of a node: nothing of a conversion that follows its reshape, both of that reshape."""
    if node.op == "convert" and any(reader.op == "reshape" and reader.result in widened for reader in readers.get(node.result, ())):
        return ()
    if node.op != "reshape" or node.result not in widened:
        return (node,)
    convert = widened[node.result]
    (narrow,) = convert.inputs
    moved = Value(TensorType(narrow.dtype, node.result.shape), narrow.name)
    return node.on((narrow,), (moved,)), replace(convert, inputs=(moved,), results=node.results)
