"""Reassociate all-reduces: where two sums over the same chips are added, the chips add their operands first and send one array.

Called when a partitioned module is imported; XLA has the same as AllReduceReassociate.

A partitioner makes such sums of the gradient of an array that several products read, each cut over what it sums: queries, keys and values
of tensor parallelism, a gate and what it gates. The order of additions is another, so this is no pass, which would keep every bit, but part
of how a partitioned program is imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tpuflow.lower.graph.graph import Graph, Node, Value


def reassociate_all_reduces(graph: Graph) -> Graph:
    """The graph with all-reduces (and reduce-scatters) merged where they can be, regions included.

    Before: %1 = collective all_reduce %0; %3 = collective all_reduce %2; %4 = add %1, %3.
    After: %5 = add %0, %2; %4 = collective all_reduce %5.    And so for reduce_scatter.
    """
    uses = Counter([*(v for node in graph.nodes for v in node.inputs), *graph.outputs])
    joining, nodes = _Reassociation(uses), []
    for node in graph.nodes:
        nodes += joining.step(replace(node, regions=tuple(map(reassociate_all_reduces, node.regions))))
    return replace(graph, nodes=tuple(joining.without_joined(nodes)))


@dataclass(frozen=True, slots=True)
class _Reassociation:
    """How often each value is used; the cross-chip sums found so far, by their results, and those that were merged into others."""

    uses: Mapping[Value, int]
    sums: dict[Value, Node] = field(default_factory=dict)
    joined: set[Node] = field(default_factory=set)

    def step(self, node: Node) -> list[Node]:
        """The nodes in the place of one."""
        if node.op == "collective" and node.attrs["reducer"] == "add":
            self.sums[node.result] = node
            return [node]
        parts = [self.sums.get(v) for v in node.inputs] if node.op == "add" else []
        one, other = parts if len(parts) == 2 else (None, None)
        if one is None or other is None or one is other or not self._are_alike(one, other):
            return [node]
        self.joined.update((one, other))
        inner = Value(one.inputs[0].type)
        total = replace(one, inputs=(inner,), results=node.results)
        self.sums[node.result] = total
        return [replace(node, inputs=(one.inputs[0], other.inputs[0]), results=(inner,)), total]

    def without_joined(self, nodes: list[Node]) -> list[Node]:
        """The nodes without the sums that were merged into others."""
        return [node for node in nodes if node not in self.joined]

    def _are_alike(self, one: Node, other: Node) -> bool:
        """Whether two sums can be merged: the same collective on operands of one type, and neither has another reader."""
        same = one.attrs == other.attrs and one.inputs[0].type == other.inputs[0].type
        return same and all(self.uses[node.result] == 1 for node in (one, other))
