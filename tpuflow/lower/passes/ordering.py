"""List scheduling: topological orders of nodes that hide transfers and free memory early."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.passes.analysis import effectful

NOTHING_BYTES = 256
"""Results of at most this size count as free: scalars that others wait for, such as the power of a step counter."""

VIEWS = ("reshape", "barrier")
"""Operations whose results alias their operands."""

RECEIVED = (*VIEWS, "await")
"""The same and `await`, whose result aliases the buffer in which its collective receives."""


@dataclass(frozen=True, slots=True)
class MemoryCosts:
    """The memory that a schedule needs: the bytes that each node allocates for its results, the values that are live at the end, and the
    limit of live bytes beyond which a transfer in flight is awaited early, so that its memory is freed.
    """

    allocated_bytes: Mapping[Node, int]
    live_out: frozenset[Value]
    limit_bytes: float = math.inf


@dataclass(frozen=True, slots=True)
class Times:
    """The durations of a region's nodes: `seconds` on the chip, and for a `start` the latency until the data have arrived; `sending`: for
    every start the seconds in which it occupies the links.
    """

    seconds: Mapping[Node, float]
    sending: Mapping[Node, float]


def list_schedule(
    nodes: Iterable[Node],
    deferred: Mapping[Node, Iterable[Node]] | None = None,
    sizes: MemoryCosts | None = None,
    times: Times | None = None,
) -> list[Node]:
    """The nodes in topological order, with effects in the given order; apart from the following, ready nodes keep the given order.

    deferred: node -> nodes after which it should run; it yields to them as long as anything else is ready. sizes: a node that frees at
    least as many bytes as it allocates runs as soon as it is ready. times: so does a transfer that allocates no more than it sends, and a
    transfer is awaited once the nodes that ran since have hidden it, earlier only if nothing else is ready or memory is short.
    """
    queue = _Queue(list(nodes), deferred or {}, sizes, None if times is None else _Clock(times))
    ordered = list(iter(queue.next, None))
    assert len(ordered) == len(queue.nodes), "a graph has no cycles"
    return ordered


class _Clock:
    """Simulated time, and the arrival times of transfers in flight; the links send one transfer after the other."""

    def __init__(self, times: Times) -> None:
        self.seconds, self.sending = times.seconds, times.sending
        self.now = self.links_free = 0.0
        self.arrivals: dict[Value, float] = {}

    def run(self, node: Node) -> None:
        """Advance the time by a node: a start only enters a transfer, an await lasts until the data have arrived."""
        if node.op == "start":
            begin = max(self.now, self.links_free)
            self.links_free = begin + self.sending[node]
            self.arrivals[node.result] = begin + self.seconds[node]
        elif node.op == "await":
            self.now = max(self.now, self.arrival(node))
        else:
            self.now += self.seconds[node]

    def arrival(self, wait: Node) -> float:
        """When the data of an await will have arrived."""
        return self.arrivals[wait.inputs[0]]


class _Queue:
    """The ready nodes, in heaps by their given position, in this order of priority: `starts` (cheap transfers), `first` (nodes that free
    memory), `ready`, `later` (deferred nodes).

    A node may be in several heaps. Awaits whose data have not arrived are in `arriving`, by arrival time, and in the set `in_flight`.
    """

    def __init__(self, nodes: list[Node], deferred: Mapping[Node, Iterable[Node]], sizes: MemoryCosts | None, clock: _Clock | None) -> None:
        number = {node: i for i, node in enumerate(nodes)}
        self.nodes = nodes
        self.needs = _requirements(nodes)
        self.deferred_on: list[set[int]] = [{number[o] for o in deferred.get(n, ()) if o is not n} for n in nodes]
        self.followers, self.deferring = _inverted(self.needs), _inverted(self.deferred_on)
        self.done = [False] * len(nodes)
        self.memory = None if sizes is None else _Memory(nodes, sizes)
        self.clock = clock
        self.starts: list[int] = []
        self.first: list[int] = []
        self.ready: list[int] = []
        self.later: list[int] = []
        self.arriving: list[tuple[float, int]] = []
        self.in_flight: set[int] = set()
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
        if self.arriving and self._earliest(self.starts) is self._earliest(self.first) is None and self._is_stalled():
            self._receive(self.arriving[0][0])
        found = (self._earliest(heap) for heap in (self.starts, self.first, self.ready, self.later))
        return next((i for i in found if i is not None), None)

    def _earliest(self, heap: list[int]) -> int | None:
        while heap and self.done[heap[0]]:
            heappop(heap)
        return heap[0] if heap else None

    def _is_stalled(self) -> bool:
        """Whether no node is ready except deferred ones, or the next would exceed the memory limit."""
        i = self._earliest(self.ready)
        return i is None or (self.memory is not None and self.memory.is_short(i))

    def _receive(self, now: float) -> None:
        """Make the awaits ready whose data have arrived by `now`."""
        while self.arriving and self.arriving[0][0] <= now:
            _, i = heappop(self.arriving)
            self.in_flight.discard(i)
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
                self._offer_requirements(j)
        for j in self.deferring[i]:
            self.deferred_on[j].discard(i)
            if not self.deferred_on[j] and not self.needs[j] and not self.done[j]:
                self._offer(j)

    def _offer(self, i: int) -> None:
        if self.clock is not None and self.nodes[i].op == "await":
            self.in_flight.add(i)
            heappush(self.arriving, (self.clock.arrival(self.nodes[i]), i))
        else:
            self._offer_ready(i)

    def _offer_ready(self, i: int) -> None:
        heappush(self.later if self.deferred_on[i] else self.ready, i)
        self._offer_first(i)

    def _offer_first(self, i: int) -> None:
        if self._can_run(i) and self.clock is not None and self._is_cheap_start(i):
            heappush(self.starts, i)
        elif self._can_run(i) and self.memory is not None and self.memory.frees(i):
            heappush(self.first, i)

    def _is_cheap_start(self, i: int) -> bool:
        """Whether a node starts a transfer that receives no more than it sends. Others, such as all-gathers, have no priority."""
        sent_bytes = sum(v.type.elems * v.dtype.bytes for v in self.nodes[i].inputs)
        return self.nodes[i].op == "start" and (self.memory is None or self.memory.made[i] <= sent_bytes)

    def _offer_requirements(self, i: int) -> None:
        """Give priority to the ready requirements of a node if they and the node together free memory: a shard of a parameter, say, for the
        update that reads it with a received gradient, whose result is then sent.
        """
        needed = self.needs[i]
        if self.memory is not None and all(map(self._can_run, needed)) and self.memory.frees(i, needed):
            for j in needed:
                heappush(self.first, j)

    def _can_run(self, i: int) -> bool:
        return not self.needs[i] and not self.deferred_on[i] and not self.done[i] and i not in self.in_flight


class _Memory:
    """The readers of every value that are still to run, and the live bytes; readers of a view count as readers of its operand."""

    def __init__(self, nodes: list[Node], sizes: MemoryCosts) -> None:
        self.held_bytes, self.limit_bytes = 0, sizes.limit_bytes
        self.made = [sizes.allocated_bytes.get(node, 0) for node in nodes]
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
        for value in sizes.live_out:
            if (origin := root.get(value, value)) in self.readers:
                self.readers[origin].add(-1)  # a reader that never runs

    def frees(self, i: int, needed: Collection[int] = ()) -> bool:
        """Whether a node, with its requirements `needed`, frees at least as many bytes as it allocates; always true of tiny results, for
        which others wait.
        """
        made = self.made[i] + sum(self.made[j] for j in needed)
        return sum(self.bytes[v] for v in self.operands[i] if self.readers[v] == {i}) + NOTHING_BYTES >= made

    def is_short(self, i: int) -> bool:
        """Whether a node's results would exceed the memory limit."""
        return self.held_bytes + self.made[i] > self.limit_bytes

    def run(self, i: int) -> list[int]:
        """Account for a node that has run; the nodes that have become the last reader of some value."""
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
    """For each node the numbers of its predecessors: producers of its operands, and the effect before it."""
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
