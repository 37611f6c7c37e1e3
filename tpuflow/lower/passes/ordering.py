"""Topological orders of nodes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.passes.analysis import effectful

NOTHING_BYTES = 256
"""Scalars and the like: a step counter's power, which every update waits for."""

VIEWS = ("reshape", "barrier")
"""Nodes whose results are their operands' buffers."""

RECEIVED = (*VIEWS, "await")
"""The same with waits, whose result is what was begun to be received."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an order of nodes does to memory: the bytes that each node's results take anew, the values that are kept to the end, and how
    many bytes may be held at a time before it is better to wait for what is on its way, and let go of it."""

    made: Mapping[Node, int]
    kept: frozenset[Value]
    room_bytes: float = math.inf


@dataclass(frozen=True, slots=True)
class Times:
    """What the nodes of a region take: `seconds` of the chip, of a `start` until what it sends has arrived; and of every start the seconds
    for which it is `sending`, and nothing else is."""

    seconds: Mapping[Node, float]
    sending: Mapping[Node, float]


def in_order(
    nodes: Iterable[Node],
    deferred: Mapping[Node, Iterable[Node]] | None = None,
    sizes: Sizes | None = None,
    times: Times | None = None,
) -> list[Node]:
    """Nodes after everything they read, effects in the given order, otherwise as early in the given order as possible.

    `deferred` names nodes that rather run after certain others; they give way as long as anything else can run. With `sizes`, a node
    that is the last to read as many bytes as it makes runs as soon as it can. With `times` of the nodes, so does a transfer that takes
    no more memory than what it sends, and any is awaited once what has run since has taken as long: earlier only where nothing else can
    run, or memory is short.
    """
    queue = _Queue(list(nodes), deferred or {}, sizes, None if times is None else _Clock(times))
    ordered = list(iter(queue.next, None))
    assert len(ordered) == len(queue.nodes), "a graph has no cycles"
    return ordered


class _Clock:
    """The time at which nodes run, and what is on its way: the links send one transfer after the other."""

    def __init__(self, times: Times) -> None:
        self.seconds, self.sending = times.seconds, times.sending
        self.now = self.free = 0.0
        self.arrivals: dict[Value, float] = {}

    def run(self, node: Node) -> None:
        """A start puts something on its way, a wait lasts until it is there, and others take their time."""
        if node.op == "start":
            begin = max(self.now, self.free)
            self.free = begin + self.sending[node]
            self.arrivals[node.result] = begin + self.seconds[node]
        elif node.op == "await":
            self.now = max(self.now, self.arrival(node))
        else:
            self.now += self.seconds[node]

    def arrival(self, wait: Node) -> float:
        """When what is waited for will be there."""
        return self.arrivals[wait.inputs[0]]


class _Queue:
    """Nodes whose requirements are met, earliest first; the deferred ones wait apart until what they wait for has run, and waits until what
    they are for is there.

    A node may be in several heaps: in `ready` (or `later`, as long as it is deferred), in `first` once it frees memory, and if it is one
    in `starts`. `moving` has waits by the time at which they cost nothing, `away` the same.
    """

    def __init__(self, nodes: list[Node], deferred: Mapping[Node, Iterable[Node]], sizes: Sizes | None, clock: _Clock | None) -> None:
        number = {node: i for i, node in enumerate(nodes)}
        self.nodes = nodes
        self.needs = _requirements(nodes)
        self.awaits: list[set[int]] = [{number[o] for o in deferred.get(n, ()) if o is not n} for n in nodes]
        self.followers, self.awaited_by = _inverted(self.needs), _inverted(self.awaits)
        self.done = [False] * len(nodes)
        self.memory = None if sizes is None else _Memory(nodes, sizes)
        self.clock = clock
        self.starts: list[int] = []
        self.first: list[int] = []
        self.ready: list[int] = []
        self.later: list[int] = []
        self.moving: list[tuple[float, int]] = []
        self.away: set[int] = set()
        for i, needs in enumerate(self.needs):
            if not needs:
                self._offer(i)

    def next(self) -> Node | None:
        """The next node to run; None at the end."""
        i = self._next()
        if i is None:
            return None
        self._run(i)
        return self.nodes[i]

    def _next(self) -> int | None:
        if self.clock is not None:
            self._receive(self.clock.now)
        if self.moving and self._earliest(self.starts) is self._earliest(self.first) is None and self._waits():
            self._receive(self.moving[0][0])
        found = (self._earliest(heap) for heap in (self.starts, self.first, self.ready, self.later))
        return next((i for i in found if i is not None), None)

    def _earliest(self, heap: list[int]) -> int | None:
        while heap and self.done[heap[0]]:
            heappop(heap)
        return heap[0] if heap else None

    def _waits(self) -> bool:
        """Whether nothing else can run than what is deferred, or it would take memory that there is not."""
        i = self._earliest(self.ready)
        return i is None or (self.memory is not None and self.memory.is_short(i))

    def _receive(self, now: float) -> None:
        """Waits for what is there by a time cost nothing any more."""
        while self.moving and self.moving[0][0] <= now:
            _, i = heappop(self.moving)
            self.away.discard(i)
            self._offer_ready(i)

    def _run(self, i: int) -> None:
        self.done[i] = True
        if self.clock is not None:
            self.clock.run(self.nodes[i])
        if self.memory is not None:
            for j in self.memory.run(i):
                self._offer_first(j)
        for j in self.followers[i]:
            self.needs[j].discard(i)
            if not self.needs[j]:
                self._offer(j)
            elif self.clock is not None:
                self._offer_needed(j)
        for j in self.awaited_by[i]:
            self.awaits[j].discard(i)
            if not self.awaits[j] and not self.needs[j] and not self.done[j]:
                self._offer(j)

    def _offer(self, i: int) -> None:
        if self.clock is not None and self.nodes[i].op == "await":
            self.away.add(i)
            heappush(self.moving, (self.clock.arrival(self.nodes[i]), i))
        else:
            self._offer_ready(i)

    def _offer_ready(self, i: int) -> None:
        heappush(self.later if self.awaits[i] else self.ready, i)
        self._offer_first(i)

    def _offer_first(self, i: int) -> None:
        if self._is_able(i) and self.clock is not None and self._is_cheap_start(i):
            heappush(self.starts, i)
        elif self._is_able(i) and self.memory is not None and self.memory.frees(i):
            heappush(self.first, i)

    def _is_cheap_start(self, i: int) -> bool:
        """Whether a node starts a transfer that takes no more memory than what it sends has: others, which gather, start in their turn."""
        sent_bytes = sum(v.type.elems * v.dtype.bytes for v in self.nodes[i].inputs)
        return self.nodes[i].op == "start" and (self.memory is None or self.memory.made[i] <= sent_bytes)

    def _offer_needed(self, i: int) -> None:
        """What a node still needs runs as soon as it can if it can now, and frees memory together with it: a parameter's share, for the
        update with what has been received, so that the links may work on its result."""
        needed = self.needs[i]
        if self.memory is not None and all(map(self._is_able, needed)) and self.memory.frees(i, needed):
            for j in needed:
                heappush(self.first, j)

    def _is_able(self, i: int) -> bool:
        return not self.needs[i] and not self.awaits[i] and not self.done[i] and i not in self.away


class _Memory:
    """Who still reads what the nodes make, and how much is held; a view's readers are its operand's."""

    def __init__(self, nodes: list[Node], sizes: Sizes) -> None:
        self.held_bytes, self.room_bytes = 0, sizes.room_bytes
        self.made = [sizes.made.get(node, 0) for node in nodes]
        self.bytes: dict[Value, int] = {}
        self.readers: dict[Value, set[int]] = {}
        self.operands: list[list[Value]] = []
        root: dict[Value, Value] = {}
        for i, node in enumerate(nodes):
            held = list(dict.fromkeys(r for v in node.inputs if (r := root.get(v, v)) in self.bytes))
            if node.op in RECEIVED:
                root.update((result, root.get(v, v)) for v, result in zip(node.inputs, node.results, strict=False))
            else:
                self.bytes.update((v, v.type.elems * v.dtype.bytes) for v in node.results)
            self.operands.append(held)
            for value in held:
                self.readers.setdefault(value, set()).add(i)
        for value in sizes.kept:
            if (origin := root.get(value, value)) in self.readers:
                self.readers[origin].add(-1)  # nobody's turn ever comes

    def frees(self, i: int, needed: Collection[int] = ()) -> bool:
        """Whether a node is the last to read as many bytes as it makes, with those that it needs; what makes next to nothing does always:
        others wait for it."""
        made = self.made[i] + sum(self.made[j] for j in needed)
        return sum(self.bytes[v] for v in self.operands[i] if self.readers[v] == {i}) + NOTHING_BYTES >= made

    def is_short(self, i: int) -> bool:
        """Whether there is no room for what a node makes."""
        return self.held_bytes + self.made[i] > self.room_bytes

    def run(self, i: int) -> list[int]:
        """A node has run: the nodes that are now the only readers of something."""
        alone = []
        self.held_bytes += self.made[i]
        for value in self.operands[i]:
            self.readers[value].discard(i)
            if len(self.readers[value]) == 1:
                alone += self.readers[value]
            elif not self.readers[value]:
                self.held_bytes -= self.bytes[value]
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
