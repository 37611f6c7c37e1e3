"""KeepOnHost: what a program puts into the host's memory stays there until it is put back, or the program is told that it does not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.memories import HOST_ARRAY, HOST_INPUT, PUT, TO_HBM, is_fetch, is_to_host
from tpuflow.lower.passes.analysis import without_results
from tpuflow.lower.passes.base import Pass
from tpuflow.lower.passes.host_uses import Item, Uses
from tpuflow.lower.passes.unit_seconds import total_bytes


@dataclass(frozen=True, slots=True)
class KeepOnHost(Pass):
    """Settle which arrays are at the host: those that are only put back into HBM, or leave the program, or are carried by a loop that puts
    others in their place; items that a loop stacks, one a trip, if items are all that is put back of them.

    Reshapes and barriers in between are not of the host: an array comes back as it is read, and may do so before what a barrier holds back.
    What something else reads stays in HBM, or is put there first if it is an input, which is said in a warning.
    Before: %1 = device_put{host} %0; %2, %3 = barrier %1, %y; %4 = device_put{hbm} %2.
    After: %1 = device_put{host} %0; %3 = barrier %y; %4 = device_put{hbm} %1.
    Needs: no fused nodes.    Keeps: every bit.    Never: drops an array that is to be at the host without saying so.
    """

    def __call__(self, graph: Graph) -> Graph:
        if not any(node.op in (PUT, HOST_INPUT) for node in graph.walk()):
            return graph
        uses = Uses.of(graph)
        begun = [node for node in graph.walk() if node.op == HOST_INPUT or is_to_host(node)]
        items = {node: item for node in begun if node.op == PUT and (item := uses.stacked(node)) is not None}
        staying = uses.staying(item.array for item in items.values())
        stacked = {node: item for node, item in items.items() if item.array in staying}
        refused = [node for node in begun if node.result not in staying and node not in stacked]
        if refused:
            warnings.warn(_text(graph, refused), UserWarning, stacklevel=2)
        updates = {item.update.result: item for item in stacked.values()}
        return _Settled(staying, updates, frozenset(item.array for item in stacked.values())).region(graph)


def _text(graph: Graph, refused: Sequence[Node]) -> str:
    names = {v: f"input {name!r}" for v, name in zip(graph.inputs, graph.input_names or map(str, range(len(graph.inputs))), strict=True)}
    at = [names[node.inputs[0]] if node.op == HOST_INPUT else node.source or "unknown source line" for node in refused]
    size = total_bytes(node.result for node in refused)
    return (
        f"{', '.join(dict.fromkeys(at))}: {len(refused)} array{'s' * (len(refused) > 1)} of {size / 2**20:.2f} MiB that should be in the "
        f"host's memory {'is' if len(refused) == 1 else 'are'} in HBM, and the peak counts them there (in a loop, of every trip): "
        f"something other than a move back to the device reads them at the host. Move each back with "
        f"jax.device_put(x, jax.memory.Space.Device) before it is read."
    )


@dataclass(slots=True)
class _Settled:
    """Rewrites regions. `staying`: what is at the host; `updates`: the items that are, by the array with the item that a trip makes;
    `arrays`: what the loop makes of these. `origins`: of what is at the host, under whatever shape or as an item, the operands that bring
    it back."""

    staying: Container[Value]
    updates: Mapping[Value, Item]
    arrays: frozenset[Value]
    origins: dict[Value, tuple[Value, ...]] = field(default_factory=dict)
    renamed: dict[Value, Value] = field(default_factory=dict)

    def region(self, graph: Graph) -> Graph:
        """A region with its nested ones."""
        nodes = tuple(new for node in graph.nodes for new in self._node(self._on_renamed(node)))
        return replace(graph, nodes=nodes, outputs=tuple(self.renamed.get(v, v) for v in graph.outputs))

    def _on_renamed(self, node: Node) -> Node:
        if self.renamed.keys().isdisjoint(node.inputs):
            return node
        return replace(node, inputs=tuple(self.renamed.get(v, v) for v in node.inputs))

    def _node(self, node: Node) -> list[Node]:
        """The nodes in the place of one."""
        if node.op == PUT:
            return self._put(node)
        if node.op == HOST_INPUT:
            return self._input(node)
        if node.regions:
            return self._with_regions(node)
        if node.op == "dynamic_update_slice" and node.result in self.updates:
            return [self._item(node, self.updates[node.result])]
        return [node] if self.origins.keys().isdisjoint(node.inputs) else _PASSED[node.op](self, node)

    def _put(self, node: Node) -> list[Node]:
        (value,) = node.inputs
        if value in self.origins and is_fetch(node):
            return [replace(node, inputs=self.origins[value])]
        if node.result in self.staying and value not in self.origins:
            self.origins[node.result] = (node.result,)
            return [node]
        self.renamed[node.result] = value
        return []

    def _input(self, node: Node) -> list[Node]:
        """Nothing, if the input is at the host for all its readers; else it is put into HBM for them."""
        (value,) = node.inputs
        if node.result in self.staying:
            self.origins[value], self.renamed[node.result] = (value,), value
            return []
        return [replace(node, op=PUT, attrs=TO_HBM)]

    def _item(self, node: Node, item: Item) -> Node:
        """The item goes to the host, and not into an array in HBM."""
        whole, update, number, *_ = node.inputs
        return replace(item.put, inputs=(update, whole, number), results=node.results)

    def _with_regions(self, node: Node) -> list[Node]:
        rooms: dict[int, Node] = {}
        operands = node.inputs[1:] if node.op == "loop" else ()
        for i, result in enumerate(node.results[: len(operands)]):
            if result in self.arrays:
                rooms[i + 1] = Node(HOST_ARRAY, (), (Value(result.type),), source=node.source, scope=node.scope)
            elif (inside := node.regions[0].inputs[i]) in self.staying:
                self.origins[inside] = (inside,)
        regions = tuple(map(self.region, node.regions))
        self.origins.update((value, (value,)) for value in node.results if value in self.staying)
        inputs = tuple(rooms[i].result if i in rooms else v for i, v in enumerate(node.inputs))
        return [*rooms.values(), replace(node, inputs=inputs, regions=regions)]

    def _reshape(self, node: Node) -> list[Node]:
        self.origins[node.result] = self.origins[node.inputs[0]]
        return []

    def _slice(self, node: Node) -> list[Node]:
        whole, number, *_ = node.inputs
        self.origins[node.result] = (*self.origins[whole], number)
        return []

    def _barrier(self, node: Node) -> list[Node]:
        """What is at the host goes past it."""
        passed = {result: value for value, result in zip(node.inputs, node.results, strict=True) if value in self.origins}
        self.renamed.update(passed)
        return without_results(node, passed)


_PASSED: Mapping[str, Callable[[_Settled, Node], list[Node]]] = {
    "reshape": _Settled._reshape, "dynamic_slice": _Settled._slice, "barrier": _Settled._barrier,
}  # fmt: skip
"""What may lie between a move to the host and one back."""
