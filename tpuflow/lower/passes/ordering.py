"""Topological orders of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.passes.analysis import effectful

NOTHING_BYTES = 256
"""Scalars and the like: a step counter's power, which every update waits for."""

VIEWS = ("reshape", "barrier")
"""Nodes whose results are their operands' buffers."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an order of nodes does to memory: the bytes that each node's results take anew, and the values that are kept to the end."""

    made: Mapping[Node, int]
    kept: frozenset[Value]


def in_order(nodes: Iterable[Node], deferred: Mapping[Node, Iterable[Node]] | None = None, sizes: Sizes | None = None) -> list[Node]:
    """Nodes after everything they read, effects in the given order, otherwise as early in the given order as possible.

    `deferred` names nodes that rather run after certain others; they give way as long as anything else can run. With `sizes`, a node
    that is the last to read as many bytes as it makes runs as soon as it can.
    """
    queue = _Queue(list(nodes), deferred or {}, sizes)
    ordered = list(iter(queue.next, None))
    assert len(ordered) == len(queue.nodes), "a graph has no cycles"
    return ordered


class _Queue:
    """Nodes whose requirements are met, earliest first; the deferred ones wait apart until what they wait for has run.

    A node may be in several heaps: in `ready` (or `later`, as long as it waits), and in `freeing` once it frees memory.
    """

    def __init__(self, nodes: list[Node], deferred: Mapping[Node, Iterable[Node]], sizes: Sizes | None) -> None:
        number = {node: i for i, node in enumerate(nodes)}
        self.nodes = nodes
        self.needs = _requirements(nodes)
        self.awaits: list[set[int]] = [{number[o] for o in deferred.get(n, ()) if o is not n} for n in nodes]
        self.followers, self.awaited_by = _inverted(self.needs), _inverted(self.awaits)
        self.done = [False] * len(nodes)
        self.memory = None if sizes is None else _Memory(nodes, sizes)
        self.freeing: list[int] = []
        self.ready: list[int] = []
        self.later: list[int] = []
        for i, needs in enumerate(self.needs):
            if not needs:
                self._offer(i)

    def next(self) -> Node | None:
        """The next node to run; None at the end."""
        for heap in (self.freeing, self.ready, self.later):
            while heap:
                i = heappop(heap)
                if not self.done[i]:
                    self._run(i)
                    return self.nodes[i]
        return None

    def _run(self, i: int) -> None:
        self.done[i] = True
        if self.memory is not None:
            for j in self.memory.read(i):
                self._offer_freeing(j)
        for j in self.followers[i]:
            self.needs[j].discard(i)
            if not self.needs[j]:
                self._offer(j)
        for j in self.awaited_by[i]:
            self.awaits[j].discard(i)
            if not self.awaits[j] and not self.needs[j] and not self.done[j]:
                self._offer(j)

    def _offer(self, i: int) -> None:
        heappush(self.later if self.awaits[i] else self.ready, i)
        self._offer_freeing(i)

    def _offer_freeing(self, i: int) -> None:
        able = not self.needs[i] and not self.awaits[i] and not self.done[i]
        if able and self.memory is not None and self.memory.frees(i):
            heappush(self.freeing, i)


class _Memory:
    """Who still reads what the nodes make; a view's readers are its operand's."""

    def __init__(self, nodes: list[Node], sizes: Sizes) -> None:
        self.made = [sizes.made.get(node, 0) for node in nodes]
        self.bytes: dict[Value, int] = {}
        self.readers: dict[Value, set[int]] = {}
        self.operands: list[list[Value]] = []
        root: dict[Value, Value] = {}
        for i, node in enumerate(nodes):
            held = list(dict.fromkeys(r for v in node.inputs if (r := root.get(v, v)) in self.bytes))
            if node.op in VIEWS:
                root.update((result, root.get(v, v)) for v, result in zip(node.inputs, node.results, strict=True))
            else:
                self.bytes.update((v, v.type.elems * v.dtype.bytes) for v in node.results)
            self.operands.append(held)
            for value in held:
                self.readers.setdefault(value, set()).add(i)
        for value in sizes.kept:
            if (origin := root.get(value, value)) in self.readers:
                self.readers[origin].add(-1)  # nobody's turn ever comes

    def frees(self, i: int) -> bool:
        """Whether a node is the last to read as many bytes as it makes; what makes next to nothing does always: others wait for it."""
        return sum(self.bytes[v] for v in self.operands[i] if self.readers[v] == {i}) + NOTHING_BYTES >= self.made[i]

    def read(self, i: int) -> list[int]:
        """A node has run: the nodes that are now the only readers of something."""
        alone = []
        for value in self.operands[i]:
            self.readers[value].discard(i)
            if len(self.readers[value]) == 1:
                alone += self.readers[value]
        return [j for j in alone if j >= 0]


def _requirements(nodes: list[Node]) -> list[set[int]]:
    """For each node the numbers of the nodes that must come first."""
    maker: dict[Value, int] = {value: i for i, node in enumerate(nodes) for value in node.results}
    needs = [{maker[v] for v in node.inputs if v in maker} for node in nodes]
    last = None
    for i, node in enumerate(nodes):
        if effectful(node):
            if last is not None:
                needs[i].add(last)
            last = i
    return needs


def _inverted(needs: list[set[int]]) -> list[list[int]]:
    followers: list[list[int]] = [[] for _ in needs]
    for i, before in enumerate(needs):
        for j in sorted(before):
            followers[j].append(i)
    return followers
