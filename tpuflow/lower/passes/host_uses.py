"""Who uses what a program puts at the host, through reshapes, barriers and loops: whether all it does is to come back, also by items."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tpuflow.lower.graph.graph import Graph, Node, TensorType, Value
from tpuflow.lower.graph.interpret import interpret
from tpuflow.lower.graph.memories import is_fetch

MOST_NODES, MOST_TRIPS = 64, 2**12
"""Nodes that compute an item's number in a trip, and trips, of which each is looked at."""


@dataclass(frozen=True, slots=True)
class Item:
    """What `put` puts at the host is written by `update` into the array that `loop` carries at a position, as another item in each trip."""

    put: Node
    update: Node
    loop: Node
    position: int


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

    # --- what comes back

    def comes_back(self, value: Value, *, is_named: bool = False) -> bool:
        """Whether nothing but moves back into HBM read a value. `is_named`: it is what was put there under another shape, or an item of it,
        which can do nothing else."""
        leaves = self.leaves.get(value, ())
        if any(region is self.graph for region, _ in leaves) and (is_named or len(leaves) > 1):
            return False
        if any(region is not self.graph and region.inputs[i] is not value for region, i in leaves):
            return False
        return all(self._brings_back(node, i, is_named=is_named) for node, i in self.readers.get(value, ()))

    def _brings_back(self, node: Node, operand: int, *, is_named: bool) -> bool:
        match node.op:
            case "reshape":
                return self.comes_back(node.result, is_named=True)
            case "barrier":
                return self.comes_back(node.results[operand], is_named=is_named)
            case "dynamic_slice":
                return (
                    not is_named and operand == 0 and self._is_item(node, node.result.type) and self.comes_back(node.result, is_named=True)
                )
            case "loop":
                return not is_named and operand > 0 and self._stays(node, operand - 1)
        return is_fetch(node)

    def _stays(self, loop: Node, position: int) -> bool:
        """Whether a loop only brings back what it carries at a position."""
        (body,) = loop.regions
        value = body.inputs[position]
        return body.outputs[position] is value and self.comes_back(value) and self.comes_back(loop.results[position])

    def _is_item(self, node: Node, item: TensorType) -> bool:
        """Whether a slice or update is of one item along the first axis."""
        whole, starts = node.inputs[0], node.inputs[-len(node.inputs[0].shape) :] if node.inputs[0].shape else ()
        return item.shape == (1, *whole.shape[1:]) and bool(starts) and all(self._constant(v) == 0 for v in starts[1:])

    # --- what is stacked

    def stacked(self, put: Node) -> Item | None:
        """The item of an array that a loop makes at the host, one in every trip, if that is all that becomes of what is put there."""
        value = put.result
        while (reader := self._only_reader(value)) is not None and reader[0].op == "reshape":
            value = reader[0].result
        if reader is None or reader[0].op != "dynamic_update_slice" or reader[1] != 1:
            return None
        update, whole = reader[0], reader[0].inputs[0]
        region, position = self.enters.get(whole, (self.graph, 0))
        loop = self.around.get(region)
        if loop is None or loop.op != "loop" or not self._is_item(update, value.type):
            return None
        passed_on = self.leaves.get(update.result, []) == [(region, position)] and not self.readers.get(update.result)
        alone = self.readers[whole] == [(update, 0)] and not self.leaves.get(whole)
        good = passed_on and alone and self._covers(loop, update.inputs[2], whole.shape[0]) and self.comes_back(loop.results[position])
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
