"""FetchItems: what loops read item by item comes back from the host item by item, where there is no room for all of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.memories import PUT, TO_HBM, is_fetch
from tpuflow.lower.passes.analysis import without_results
from tpuflow.lower.passes.base import Pass
from tpuflow.lower.passes.host_uses import Uses


@dataclass(frozen=True, slots=True)
class FetchItems(Pass):
    """Put an array back into HBM item by item in the loops that read no more of it than an item at a time, such as the layers of a scan,
    and as a whole for its other readers alone; for those behind a barrier once more. It comes several times then, and so only in a program
    that does not fit otherwise (`saves_memory`).
    Before: %1 = device_put{hbm} %0; loop %1 { %2 = dynamic_slice{sizes=(1,4)} %1, %n, 0; ... }; %3 = add %1, %y.
    After: %1 = device_put{hbm} %0; loop %0 { %2 = device_put{hbm} %0, %n; ... }; %3 = add %1, %y.
    Needs: no fused nodes; `KeepOnHost`.    Keeps: every bit.    Never: fetches an item that the program does not slice.
    """

    saves_memory: bool = False

    def saving_memory(self) -> FetchItems:
        """This pass for a program that does not fit."""
        return replace(self, saves_memory=True)

    def __call__(self, graph: Graph) -> Graph:
        if not self.saves_memory or not any(is_fetch(node) for node in graph.walk()):
            return graph
        graph = _past_barriers(graph)
        found = _ByItems.of(graph)
        return found.region(graph) if found.slices else graph


def _past_barriers(graph: Graph) -> Graph:
    """The graph with what has come from the host fetched again behind barriers, in place of being held for them."""
    fetched: dict[Value, Node] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if is_fetch(node):
            fetched[node.result] = node
        if node.op == "barrier":
            again = [replace(fetched[v], results=(r,)) for v, r in zip(node.inputs, node.results, strict=True) if v in fetched]
            fetched.update((fetch.result, fetch) for fetch in again)
            nodes += [*without_results(node, [fetch.result for fetch in again]), *again]
        else:
            nodes.append(replace(node, regions=tuple(map(_past_barriers, node.regions))) if node.regions else node)
    return replace(graph, nodes=tuple(nodes))


@dataclass(slots=True)
class _ByItems:
    """Slices that fetch their items, and the operands of loops that stay at the host: by node and number what is there."""

    slices: set[Node] = field(default_factory=set)
    operands: dict[tuple[Node, int], Value] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph) -> _ByItems:
        """Those of all arrays that are fetched as a whole."""
        uses, found = Uses.of(graph), cls()
        for fetch in (node for node in graph.walk() if is_fetch(node) and len(node.inputs) == 1):
            for loop, operand in uses.readers.get(fetch.result, ()):
                if slices := _slices(uses, loop, operand):
                    found.slices.update(slices)
                    found.operands[loop, operand] = fetch.inputs[0]
        return found

    def region(self, graph: Graph) -> Graph:
        """A region with its nested ones."""
        return replace(graph, nodes=tuple(map(self._node, graph.nodes)))

    def _node(self, node: Node) -> Node:
        if node in self.slices:
            return replace(node, op=PUT, inputs=node.inputs[:2], attrs=TO_HBM)
        if not node.regions:
            return node
        inputs = tuple(self.operands.get((node, i), value) for i, value in enumerate(node.inputs))
        return replace(node, inputs=inputs, regions=tuple(map(self.region, node.regions)))


def _slices(uses: Uses, loop: Node, operand: int) -> list[Node] | None:
    """The slices that are all that the trips of a loop, or of loops inside of it, read of an operand, each an item, if nobody reads it
    after the loop; else None, as for what is no loop."""
    if loop.op != "loop" or not operand:
        return None
    result, (body,) = loop.results[operand - 1], loop.regions
    inside = body.inputs[operand - 1]
    if uses.leaves.get(inside) != [(body, operand - 1)] or uses.readers.get(result) or uses.leaves.get(result):
        return None
    found: list[Node] = []
    for node, i in uses.readers.get(inside, ()):
        is_slice = node.op == "dynamic_slice" and i == 0 and uses.is_item(node, node.result.type)
        slices = [node] if is_slice else _slices(uses, node, i)
        if slices is None:
            return None
        found += slices
    return found
