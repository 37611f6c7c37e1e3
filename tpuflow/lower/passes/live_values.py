"""LiveValues: which values are live at the memory peak of a region, for passes that shorten their lifetimes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tpuflow.chips import Chip
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.memories import at_host
from tpuflow.lower.passes.analysis import effectful
from tpuflow.lower.passes.ordering import VIEWS
from tpuflow.lower.passes.region_builder import bytes_of
from tpuflow.lower.passes.unit_seconds import FILLED_SHARE, held_seconds


@dataclass(slots=True)
class LiveValues:
    """The nodes of a graph, with definitions, readers and lifetimes of their values: kept up to date as nodes change, since a graph has
    many thousands of them. `place`: node -> its position; `root`: a view -> the value that it is a view of, and `views` the reverse."""

    graph: Graph
    chip: Chip
    saves_memory: bool
    nodes: list[Node] = field(default_factory=list)
    place: dict[Node, int] = field(default_factory=dict)
    maker: dict[Value, Node] = field(default_factory=dict)
    readers: dict[Value, list[Node]] = field(default_factory=dict)
    root: dict[Value, Value] = field(default_factory=dict)
    views: dict[Value, list[Value]] = field(default_factory=dict)
    outputs: frozenset[Value] = frozenset()
    kept: frozenset[Value] = frozenset()  # outputs, and what they are views of
    peak: int = 0
    is_over_limit: bool = False

    @classmethod
    def of(cls, graph: Graph, nodes: Sequence[Node], chip: Chip, *, saves_memory: bool) -> LiveValues:
        """Index a graph's nodes."""
        found = cls(graph, chip, saves_memory, outputs=frozenset(graph.outputs))
        for node in nodes:
            found._enter(node)
            if node.op in VIEWS:
                for value, view in zip(node.inputs, node.results, strict=True):
                    found.root[view] = root = found.root.get(value, value)
                    found.views.setdefault(root, []).append(view)
        found.kept = frozenset(found.root.get(v, v) for v in graph.outputs)
        found.reorder(nodes)
        return found

    def _enter(self, node: Node) -> None:
        self.maker.update(dict.fromkeys(node.results, node))
        for value in dict.fromkeys(node.inputs):
            self.readers.setdefault(value, []).append(node)

    def put(self, at: int, node: Node) -> None:
        """Put a kernel in the place of another."""
        old = self.nodes[at]
        for value in old.results:
            del self.maker[value]
        for value in dict.fromkeys(old.inputs):
            self.readers[value].remove(old)
        self._enter(node)
        self.nodes[at] = node
        self.place[node] = self.place.pop(old)

    def insert(self, at: int, node: Node) -> None:
        """Put a new kernel before the one at a position."""
        self._enter(node)
        self.reorder([*self.nodes[:at], node, *self.nodes[at:]])

    def reorder(self, nodes: Sequence[Node]) -> None:
        """Take all nodes in another order."""
        self.nodes = list(nodes)
        self.place = {node: at for at, node in enumerate(nodes)}

    def read_at(self, value: Value) -> list[int]:
        """The positions of the nodes that read a value, in order."""
        return sorted(self.place[node] for node in self.readers.get(value, ()))

    def find_peak(self) -> None:
        """Find where most of HBM is held, and whether it is more than there is, inputs included; outputs of an input's type are taken to
        have that one's place."""
        given, host = {v.type for v in self.graph.inputs}, at_host(self.nodes)
        change = np.zeros(len(self.nodes) + 2, np.int64)
        for value, node in self.maker.items():
            if value not in self.root and value not in host and not (value in self.outputs and value.type in given):
                at = self.place[node]
                change[at] += bytes_of(value.type)
                change[max(self.last_read(value), at) + 1] -= bytes_of(value.type)
        held = np.cumsum(change)
        self.peak = int(held.argmax())
        peak_bytes = int(held.max()) + sum(bytes_of(v.type) for v in self.graph.inputs if v not in host)
        self.is_over_limit = self.saves_memory or peak_bytes > FILLED_SHARE * self.chip.available_hbm_bytes

    def worth_seconds(self, freed_bytes: float) -> float:
        """The most time that it is worth to spend so that so many bytes are not live at the peak."""
        return math.inf if self.is_over_limit else held_seconds(freed_bytes, self.chip)

    def last_read(self, value: Value) -> int:
        """The position of the last node that reads a value, directly or through views; that after the last node for outputs."""
        root = self.root.get(value, value)
        if root in self.kept:
            return len(self.nodes)
        return max((self.place[node] for v in (root, *self.views.get(root, ())) for node in self.readers.get(v, ())), default=-1)

    def is_live_at_peak(self, value: Value) -> bool:
        """Whether a value is live at the peak for later readers only, none of which is a view."""
        maker, readers = self.maker.get(value), self.readers.get(value, ())
        if maker is None or not self.place[maker] < self.peak < self.last_read(value) or self.nodes[self.peak] in readers:
            return False
        return not any(node.op in VIEWS for node in readers)

    def order_with_earlier(self, at: int, before: Iterable[int]) -> list[int] | None:
        """An order of all nodes in which one precedes some others; None if it depends on them, or effects would be reordered."""
        first = min(before, default=at)
        if at < first:
            return list(range(len(self.nodes)))
        needed, wanted = {at}, set(self.nodes[at].inputs)
        for i in range(at - 1, first - 1, -1):
            if not wanted.isdisjoint(self.nodes[i].results):
                needed.add(i)
                wanted.update(self.nodes[i].inputs)
        if not needed.isdisjoint(before) or any(effectful(self.nodes[i]) for i in needed):
            return None
        between = range(first, at + 1)
        return [*range(first), *sorted(needed), *(i for i in between if i not in needed), *range(at + 1, len(self.nodes))]
