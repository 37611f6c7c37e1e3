"""When each value of a graph is needed, over nested loops and branches, and which values want to share a buffer.

Time is one line of ticks through the whole program, regions included. Tick p has two halves: 2p, when operands are read that the
node's results may overwrite, and 2p + 1, when other operands are read and results are written. So an operand that may be updated in
place is over before the result begins, and any other operand is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tpuflow.lower.emit import overwritable
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.memories import HOST_ARRAY, START_PUT

FOREVER = 2**62
PIECEWISE = frozenset(("dynamic_update_slice", "scatter_rows"))
Span = tuple[int, int]


@dataclass(slots=True)
class Lifetimes:
    """`spans`: closed intervals of half ticks in which a value's content is in its buffer (values of one region have one span).

    `same`: pairs that are one content and must share a buffer. `coalescing`: pairs of different contents, the later of which would be made
    in the earlier one's place, most wanted first. `replacing`: the same for operands that a kernel may overwrite and results of their type,
    which saves memory if nothing dearer wants either place. `begin` and `end`: the tick at which a node starts, and a region ends.
    """

    spans: dict[Value, list[Span]] = field(default_factory=dict)
    same: list[tuple[Value, Value]] = field(default_factory=list)
    coalescing: list[tuple[Value, Value]] = field(default_factory=list)
    replacing: list[tuple[Value, Value]] = field(default_factory=list)
    begin: dict[Node, int] = field(default_factory=dict)
    end: dict[Graph, int] = field(default_factory=dict)


def lifetimes(graph: Graph) -> Lifetimes:
    """The lifetimes of all values of a program's graph; its inputs are there from the start, its outputs to the end."""
    walk = _Liveness()
    walk.define(graph.inputs, 0)
    walk.region(graph)
    for value in graph.outputs:
        walk.use(value, FOREVER)
    walk.found.coalescing = walk.carried + walk.updated + walk.chosen
    return walk.found


def immediates(graph: Graph) -> set[Value]:
    """Splats that live in instructions only: padding values, which emission writes into windows."""
    splats = {node.result for node in graph.nodes if node.op == "full"}
    stored = set(graph.outputs).union(*(node.inputs[:1] if node.op == "pad" else node.inputs for node in graph.nodes))
    return splats - stored


class _Liveness:
    def __init__(self) -> None:
        self.found = Lifetimes()
        self.clock = 0
        self.immediate: set[Value] = set()
        self.rooms: set[Value] = set()
        self.carried: list[tuple[Value, Value]] = []
        self.updated: list[tuple[Value, Value]] = []
        self.chosen: list[tuple[Value, Value]] = []

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def define(self, values: tuple[Value, ...], time: int) -> None:
        for value in values:
            self.found.spans[value] = [(time, time)]

    def use(self, value: Value, time: int) -> None:
        if value in self.immediate:
            return
        start, end = self.found.spans[value][-1]
        self.found.spans[value][-1] = (start, max(end, time))

    def region(self, graph: Graph) -> int:
        """Walk a region whose inputs are defined; the tick of its end."""
        immediate = immediates(graph)
        self.immediate |= immediate
        for node in graph.nodes:
            if immediate.isdisjoint(node.results):
                _HANDLERS.get(node.op, _Liveness.plain)(self, node)
        end = self.found.end[graph] = self.tick()
        for value in graph.outputs:
            self.use(value, 2 * end)
        return end

    def plain(self, node: Node) -> None:
        at = self.found.begin[node] = self.tick()
        replaced = overwritable(node)
        for value in node.inputs:
            self.use(value, 2 * at + (value not in replaced))
        self.define(node.results, 2 * at + 1)
        if node.op in PIECEWISE:
            self.updated.append((node.inputs[0], node.result))
        else:
            self.found.replacing += [(v, r) for r in node.results for v in node.inputs if v in replaced and v.type == r.type]

    def constant(self, node: Node) -> None:
        self.define(node.results, 0)
        self.use(node.result, FOREVER)

    def host_array(self, node: Node) -> None:
        """Zeros at first: nothing else ever lies in its place."""
        self.define(node.results, 0)
        self.use(node.result, FOREVER)
        self.rooms.update(node.results)

    def start_put(self, node: Node) -> None:
        """An array of which an item is put at the host stays where it is."""
        self.plain(node)
        if len(node.inputs) == 3:
            self.found.same.append((node.inputs[1], node.result))

    def reshape(self, node: Node) -> None:
        at = self.tick()
        self.use(node.inputs[0], 2 * at)
        self.define(node.results, 2 * at)
        self.found.same.append((node.inputs[0], node.result))

    def barrier(self, node: Node) -> None:
        at = self.tick()
        for value, result in zip(node.inputs, node.results, strict=True):
            self.use(value, 2 * at)
            self.define((result,), 2 * at)
            self.found.same.append((value, result))

    def await_(self, node: Node) -> None:
        """What is awaited is received where it was begun to; what is sent stays until then."""
        at = self.tick()
        for value in node.inputs:
            self.use(value, 2 * at)
        self.define(node.results, 2 * at)
        self.found.same.append((node.inputs[0], node.result))

    def loop(self, node: Node) -> None:
        trips, *carries = node.inputs
        (body,) = node.regions
        begin = self.found.begin[node] = self.tick()
        self.use(trips, 2 * begin + 1)
        self._carry(node, tuple(carries), body, begin)
        self.region(body)
        self._leave(node, tuple(carries), body)

    def while_(self, node: Node) -> None:
        """The condition reads the carries, so they stay as they are until it ends; it runs once more before the loop is left."""
        condition, body = node.regions
        begin = self.found.begin[node] = self.tick()
        self._carry(node, node.inputs, body, begin)
        self.define(condition.inputs, 2 * begin + 1)
        decided = self.region(condition)
        for value in (*condition.inputs, *condition.outputs):
            self.use(value, 2 * decided + 1)
        self.found.same += zip(body.inputs, condition.inputs, strict=True)
        self.region(body)
        self._leave(node, node.inputs, body)

    def _carry(self, node: Node, carries: tuple[Value, ...], body: Graph, begin: int) -> None:
        for value in carries:
            self.use(value, 2 * begin)
        self.define(body.inputs, 2 * begin + 1)
        for start, into, out, result in zip(carries, body.inputs, body.outputs, node.results, strict=True):
            self.found.same.append((into, result))
            if into is out or start in self.rooms:
                self.found.same.append((start, into))
            else:
                self.carried += [(into, out), (into, start)]

    def _leave(self, node: Node, carries: tuple[Value, ...], body: Graph) -> None:
        end = self.tick()
        for start, into, out in zip(carries, body.inputs, body.outputs, strict=True):
            if into is out:
                self.use(start, 2 * end)
                self.use(into, 2 * end)
        self.define(node.results, 2 * end + 1)

    def switch(self, node: Node) -> None:
        """One branch runs: what the others would still read need not be kept. Results are written when a branch ends."""
        index, *operands = node.inputs
        begin = self.found.begin[node] = self.tick()
        self.use(index, 2 * begin + 1)
        for value in operands:
            self.use(value, 2 * begin)
        written: list[Span] = []
        for branch in node.regions:
            self.define(branch.inputs, 2 * self.tick())
            self.found.same += zip(operands, branch.inputs, strict=True)
            self.chosen += zip(node.results, branch.outputs, strict=True)
            end = self.region(branch)
            written.append((2 * end + 1, 2 * end + 1))
        left = 2 * self.tick() + 1
        for value in node.results:
            self.found.spans[value] = [*written, (left, left)]


_HANDLERS: Mapping[str, Callable[[_Liveness, Node], None]] = {
    "constant": _Liveness.constant,
    "reshape": _Liveness.reshape,
    "barrier": _Liveness.barrier,
    "await": _Liveness.await_,
    HOST_ARRAY: _Liveness.host_array,
    START_PUT: _Liveness.start_put,
    "loop": _Liveness.loop,
    "while": _Liveness.while_,
    "switch": _Liveness.switch,
}
