"""Who uses what a program puts at the host, through reshapes, barriers and loops: whether all it does is to come back, also by items."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tpuflow.lower.graph.graph import Graph, Node, TensorType, Value
from tpuflow.lower.graph.interpret import interpret
from tpuflow.lower.graph.memories import HOST_INPUT, is_fetch, is_to_host

MOST_NODES, MOST_TRIPS = 64, 2**12
"""Nodes that compute an item's number in a trip, and trips, of which each is looked at."""


@dataclass(frozen=True, slots=True)
class Item:
    """What `put` puts at the host is written by `update` into the array that `loop` carries at a position, as another item in each trip."""

    put: Node
    update: Node
    loop: Node
    position: int

    @property
    def array(self) -> Value:
        """The whole array, after the loop."""
        return self.loop.results[self.position]


@dataclass(slots=True)
class Uses:
    """Of every value of a graph and its regions who makes it, who reads it as which operand, and of which region it is which output or
    input; and the node that runs each region."""

    graph: Graph
    makers: dict[Value, Node] = field(default_factory=dict)
    readers: dict[Value, list[tuple[Node, int]]] = field(default_factory=lambda: defaultdict(list))
    leaves: dict[Value, list[tuple[Graph, int]]] = field(default_factory=lambda: defaultdict(list))
    enters: dict[Value, tuple[Graph, int]] = field(default_factory=dict)
    around: dict[Graph, Node] = field(default_factory=dict)
    known: dict[Value, np.ndarray | None] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph) -> Uses:
        """Look at a whole graph."""
        found = cls(graph)
        found._look(graph)
        return found

    def _look(self, graph: Graph) -> None:
        self.enters.update((value, (graph, i)) for i, value in enumerate(graph.inputs))
        for i, value in enumerate(graph.outputs):
            self.leaves[value].append((graph, i))
        for node in graph.nodes:
            self.makers.update(dict.fromkeys(node.results, node))
            for i, value in enumerate(node.inputs):
                self.readers[value].append((node, i))
            for region in node.regions:
                self.around[region] = node
                self._look(region)

    # --- what stays at the host

    def staying(self, stacked: Iterable[Value]) -> set[Value]:
        """The values that are at the host: of all that is put there, or is there from the start, and what views, items and loops make of
        it, those of which nothing is read but what is put back into HBM. `stacked`: arrays that loops make of items that are put there."""
        roots = {v for v, node in self.makers.items() if node.op == HOST_INPUT or is_to_host(node)} | {*stacked}
        found: dict[Value, bool] = {}
        wanted = [(value, False) for value in roots]
        while wanted:
            value, is_named = wanted.pop()
            if value not in found:
                found[value] = is_named
                wanted += self._made_of(value, is_named=is_named)
        while refused := [v for v in found if not (self._comes_from(v, found, roots) and self._is_only_moved(v, found))]:
            for value in refused:
                del found[value]
        return {*found}

    def _made_of(self, value: Value, *, is_named: bool) -> Iterator[tuple[Value, bool]]:
        """What is the same array as a value that is at the host, or an item of it, and whether that is under another shape, or as an item:
        then all it can do is to come back."""
        for node, i in self.readers.get(value, ()):
            match node.op:
                case "reshape" | "dynamic_slice":
                    yield node.result, True
                case "barrier":
                    yield node.results[i], is_named
                case "loop" if i > 0:
                    yield node.regions[0].inputs[i - 1], False
                    yield node.results[i - 1], False
        for region, i in self.leaves.get(value, ()):
            if region is not self.graph and self.around[region].op == "loop":
                yield region.inputs[i], False
                yield self.around[region].results[i], False

    def _comes_from(self, value: Value, found: Container[Value], roots: Container[Value]) -> bool:
        """Whether a value is put at the host, or what it is made of is there; of what a loop carries, before every trip and after it."""
        if value in roots:
            return True
        node = self.makers.get(value)
        if node is None:
            return self._is_carried_in(value, found)
        if node.op == "loop":
            return node.regions[0].inputs[node.results.index(value)] in found
        return node.inputs[node.results.index(value) if node.op == "barrier" else 0] in found

    def _is_carried_in(self, value: Value, found: Container[Value]) -> bool:
        region, i = self.enters[value]
        loop = self.around.get(region)
        return loop is not None and loop.op == "loop" and loop.inputs[i + 1] in found and region.outputs[i] in found

    def _is_only_moved(self, value: Value, found: Mapping[Value, bool]) -> bool:
        """Whether every reader of a value puts it back, or hands it on as it is."""
        leaves, readers = self.leaves.get(value, ()), self.readers.get(value, ())
        return all(self._may_leave(value, region, i, found) for region, i in leaves) and all(
            self._may_read(value, node, i, found) for node, i in readers
        )

    def _may_leave(self, value: Value, region: Graph, i: int, found: Mapping[Value, bool]) -> bool:
        if found[value]:
            return False
        return region is self.graph or (self.around[region].op == "loop" and region.inputs[i] in found)

    def _may_read(self, value: Value, node: Node, operand: int, found: Mapping[Value, bool]) -> bool:
        match node.op:
            case "reshape":
                return node.result in found
            case "barrier":
                return node.results[operand] in found
            case "dynamic_slice":
                return not found[value] and operand == 0 and self.is_item(node, node.result.type) and node.result in found
            case "loop":
                return not found[value] and operand > 0 and node.regions[0].inputs[operand - 1] in found
        return is_fetch(node) or (is_to_host(node) and not found[value] and node.result in found)

    def is_item(self, node: Node, item: TensorType) -> bool:
        """Whether a slice or update is of one item along the first axis."""
        whole, starts = node.inputs[0], node.inputs[-len(node.inputs[0].shape) :] if node.inputs[0].shape else ()
        return item.shape == (1, *whole.shape[1:]) and bool(starts) and all(self._constant(v) == 0 for v in starts[1:])

    # --- what is stacked

    def stacked(self, put: Node) -> Item | None:
        """The item of an array that a loop makes, one in every trip, if that is all that becomes of what is put at the host."""
        value = put.result
        while (reader := self._only_reader(value)) is not None and reader[0].op == "reshape":
            value = reader[0].result
        if reader is None or reader[0].op != "dynamic_update_slice" or reader[1] != 1:
            return None
        update, whole = reader[0], reader[0].inputs[0]
        region, position = self.enters.get(whole, (self.graph, 0))
        loop = self.around.get(region)
        if loop is None or loop.op != "loop" or not self.is_item(update, value.type):
            return None
        passed_on = self.leaves.get(update.result, []) == [(region, position)] and not self.readers.get(update.result)
        alone = self.readers[whole] == [(update, 0)] and not self.leaves.get(whole)
        good = passed_on and alone and self._covers(loop, update.inputs[2], whole.shape[0])
        return Item(put, update, loop, position) if good else None

    def _only_reader(self, value: Value) -> tuple[Node, int] | None:
        readers = self.readers.get(value, [])
        return readers[0] if len(readers) == 1 and not self.leaves.get(value) else None

    def _covers(self, loop: Node, index: Value, count: int) -> bool:
        """Whether the trips of a loop are as many as items, and each has the number of another."""
        (body,) = loop.regions
        positions, nodes = self._computed(body, [index])
        begin = [self._constant(loop.inputs[i + 1]) for i in positions]
        if count > MOST_TRIPS or self._constant(loop.inputs[0]) != count or nodes is None or any(x is None for x in begin):
            return False
        trip = Graph("item", tuple(body.inputs[i] for i in positions), tuple(nodes), (index, *(body.outputs[i] for i in positions)))
        found, state = set[int](), begin
        for _ in range(count):
            number, *state = interpret(trip, *state)
            found.add(int(number))
        return found == set(range(count))

    def _computed(self, region: Graph, values: Sequence[Value]) -> tuple[list[int], list[Node] | None]:
        """The carries on which some scalars depend, from trip to trip, and the nodes that compute them in order; None if it is no scalars
        that they are computed from, or by many nodes."""
        positions: list[int] = []
        needed: set[Node] = set()
        wanted = list(values)
        while wanted:
            value = wanted.pop()
            node = self.makers.get(value)
            if value.type.elems != 1 or len(needed) > MOST_NODES or (node is not None and node.regions):
                return positions, None
            if node is None:
                _, position = self.enters[value]
                if position not in positions:
                    positions.append(position)
                    wanted.append(region.outputs[position])
            elif node not in needed:
                needed.add(node)
                wanted += node.inputs
        return positions, [node for node in region.nodes if node in needed]

    def _constant(self, value: Value) -> np.ndarray | None:
        """A scalar's value, if the program says it: where it is made, or around the loops that hand it on as it is."""
        if value not in self.known:
            self.known[value] = self._found(value) if value.type.elems == 1 else None
        return self.known[value]

    def _found(self, value: Value) -> np.ndarray | None:
        node = self.makers.get(value)
        if node is None:
            return self._handed(value)
        if node.regions or len(node.results) != 1 or node.op in ("infeed", "position"):
            return None
        operands = [self._constant(v) for v in node.inputs]
        if any(x is None for x in operands):
            return None
        return interpret(Graph("constant", node.inputs, (node,), node.results), *operands)[0]

    def _handed(self, value: Value) -> np.ndarray | None:
        region, position = self.enters[value]
        loop = self.around.get(region)
        invariant = loop is not None and loop.op == "loop" and region.outputs[position] is value
        return self._constant(loop.inputs[position + 1]) if loop is not None and invariant else None
