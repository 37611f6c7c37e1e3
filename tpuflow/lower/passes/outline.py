"""From groups to `fused` nodes: which values go through memory, and what a kernel computes again rather than read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from tpuflow.isa.elementwise import OPERATIONS, TRANSCENDENTAL
from tpuflow.lower.graph.blocking import ceil_div
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.ops import ELEMENTWISE, PRODUCTS
from tpuflow.lower.graph.products import contraction_of, sizes_of
from tpuflow.lower.passes.grouping import STRETCHED, Group, Grouping
from tpuflow.lower.passes.ordering import in_order
from tpuflow.lower.tiling import MATRIX_EDGE

COSTLY = frozenset(name for name, row in OPERATIONS.items() if row.price == TRANSCENDENTAL)
COSTLY_WEIGHT = 6
MAX_REPEATED_WEIGHT = 24
MAX_REPEATS = 3
CHEAP_WEIGHT = 2
MOST_READ = (
    2.25  # times the bytes of a value, to compute it again: what storing and loading it moves, and a little for one number a channel
)
KERNEL_BYTES = 4 * 1024 * 1024  # of memory traffic, to have one kernel more: what memory moves while it starts, and then some

PASSING = frozenset(("convert", "broadcast", "window", "reshape", "full", "iota", "bitcast"))


def weight(node: Node) -> int:
    """Passes through the vector unit, roughly."""
    return COSTLY_WEIGHT if node.op in COSTLY else 1


def times_read(product: Node, operand: Value) -> int:
    """How often the tiles of a product read all of an operand: the left one for each tile of columns, the right one for each of rows."""
    whole, sizes = contraction_of(product), sizes_of(product)
    others = [labels for labels, value in zip((whole.columns, whole.rows), product.inputs, strict=True) if value is operand]
    return sum(ceil_div(math.prod(sizes[x] for x in labels), MATRIX_EDGE) for labels in others)


def bytes_of(values: Iterable[Value]) -> int:
    """Size of values in memory."""
    return sum(v.type.elems * v.dtype.bytes for v in values)


@dataclass(slots=True)
class _Repeats:
    """What one kernel computes again: the weight it may still take on, and the nodes agreed on."""

    budget: int
    accepted: set[Node] = field(default_factory=set)


class Outline:
    """Builds the fused nodes of a grouping, last group first, so that a group knows which of its values others still want."""

    def __init__(self, grouping: Grouping) -> None:
        self.grouping = grouping
        self.users: dict[Value, list[Node]] = {}
        for node in grouping.position:
            for value in node.inputs:
                self.users.setdefault(value, []).append(node)
        self.wanted = set(grouping.outputs)

    def build(self) -> list[Node]:
        """The nodes that replace the region's, each with everything it needs before it, otherwise in program order."""
        position = self.grouping.position
        first = {group: min(position[n] for n in group.nodes) for group in self.grouping.groups}
        ranked: list[tuple[int, Node]] = []
        for group in sorted(first, key=lambda g: (-g.level, -first[g])):
            node = group.nodes[0] if group.kind is None else self._fused(group, group.kind)
            if node is not None:
                self.wanted.update(node.inputs)
                ranked.append((first[group], node))
        return in_order(node for _, node in sorted(ranked, key=lambda entry: entry[0]))

    def _fused(self, group: Group, kind: Kind) -> Node | None:
        results = [v for n in self._sorted(group.nodes) for v in n.results if v in self.wanted]
        if not results:
            return None
        inner = self._sorted(self._collect(group, results))
        main = _main(kind, inner)
        region, inputs = _region(kind, inner, results)
        return Node("fused", inputs, tuple(results), MappingProxyType({"kind": kind}), (region,), main.source, main.scope)

    def _sorted(self, nodes: Iterable[Node]) -> list[Node]:
        return sorted(nodes, key=self.grouping.position.__getitem__)

    # --- what a kernel computes itself ------------------------------------------------------------------------------

    def _collect(self, group: Group, results: Iterable[Value]) -> list[Node]:
        """The nodes that make the results: the group's own, inlined ones, and what it computes again."""
        found: dict[Node, None] = {}
        repeats = _Repeats(MAX_REPEATED_WEIGHT)
        stack = [self.grouping.maker[v] for v in results]
        while stack:
            node = stack.pop()
            if node in found:
                continue
            found[node] = None
            if node.op in STRETCHED:
                continue  # its operand is always read from memory
            for value in node.inputs:
                maker = self.grouping.maker.get(value)
                if maker is not None and self._computes(group, node, maker, repeats):
                    stack.append(maker)
        return list(found)

    def _computes(self, group: Group, user: Node, maker: Node, repeats: _Repeats) -> bool:
        """Whether the kernel of `group` computes an operand of `user` rather than read it."""
        made_in = self.grouping.group_of.get(maker)
        if made_in is None or made_in is group:
            return True
        if maker.op not in ELEMENTWISE or self._must_store(maker.result):
            return False
        if maker in repeats.accepted:
            return True
        if maker.op == "convert" and self._worth_converting(maker):
            return True
        return user.op not in PRODUCTS and made_in.kind is Kind.MAP and self._repeats(group, maker, made_in, repeats)

    def _repeats(self, group: Group, maker: Node, made_in: Group, repeats: _Repeats) -> bool:
        """Whether to compute a value of a map again: if nobody else wants it, or if it is cheap for all who want it."""
        cone = self._cone(maker, made_in)
        cost = sum(map(weight, cone))
        if not self._only_for(cone, maker.result, group):
            readers = {g for n in self.users[maker.result] if (g := self.grouping.group_of.get(n)) is not None and g is not made_in}
            many = len(readers) > MAX_REPEATS and cost > CHEAP_WEIGHT
            if many or cost > repeats.budget or self._bytes_read(cone) > MOST_READ * bytes_of([maker.result]):
                return False
            repeats.budget -= cost
        repeats.accepted.update(cone)
        return True

    def _bytes_read(self, cone: dict[Node, None]) -> int:
        leaves = {v: None for n in cone for v in n.inputs if self.grouping.maker.get(v) not in cone}
        return bytes_of({s: None for v in leaves if (s := self.grouping.source(v)) is not None})

    def _must_store(self, value: Value) -> bool:
        """Whether a value goes to memory whatever this kernel does: wanted already, or read by something that cannot compute it."""
        return value in self.wanted or any(self._reads_memory(node, value) for node in self.users[value])

    def _reads_memory(self, node: Node, value: Value) -> bool:
        if node.op in PRODUCTS:
            maker = self.grouping.maker[value]
            return not (maker.op == "convert" and self._worth_converting(maker))
        return node.op in STRETCHED or self.grouping.group_of[node].kind is None

    def _worth_converting(self, convert: Node) -> bool:
        """Reading the operand of a convert instead costs no more memory traffic: it is narrower, or is stored anyway and not read often."""
        operand = convert.inputs[0]
        if self.grouping.source(operand) is not operand:
            return False
        made_in = self.grouping.group(operand)
        stored = made_in is None or made_in.kind is None or operand in self.wanted
        return operand.dtype.bytes < convert.result.dtype.bytes or (stored and not self._worth_storing(convert))

    def _worth_storing(self, convert: Node) -> bool:
        """A narrower copy of a stored operand saves more of what products read, again for each of their tiles, than making it costs."""
        wide, narrow = bytes_of(convert.inputs), bytes_of(convert.results)
        times = sum(times_read(n, convert.result) for n in self.users[convert.result] if n.op in PRODUCTS)
        own_kernel = self.grouping.group_of[convert] is not self.grouping.group(convert.inputs[0])
        return times * (wide - narrow) > narrow + (wide + KERNEL_BYTES if own_kernel else 0)

    def _cone(self, maker: Node, group: Group) -> dict[Node, None]:
        """The node and everything of its group that it is made of, up to what is stored."""
        cone: dict[Node, None] = {}
        stack = [maker]
        while stack:
            node = stack.pop()
            if node in cone:
                continue
            cone[node] = None
            makers = (self.grouping.maker.get(v) for v in node.inputs)
            stack += [m for m in makers if m is not None and self.grouping.group_of.get(m) is group and not self._must_store(m.result)]
        return cone

    def _only_for(self, cone: dict[Node, None], value: Value, group: Group) -> bool:
        """Whether nothing but `group` uses what the cone computes."""
        inside = all(user in cone for n in cone if n.result is not value for user in self.users[n.result])
        return inside and all(self.grouping.group_of.get(user) is group for user in self.users[value])


def _main(kind: Kind, nodes: list[Node]) -> Node:
    """The node whose layer and source line a fused node bears: its product or reduction, else the last in a layer that does work."""
    steps = PRODUCTS if kind is Kind.DOT else (kind.value,)
    working = [n for n in nodes if n.op in steps] or [n for n in reversed(nodes) if n.op not in PASSING]
    return next((n for n in working if n.scope), working[0]) if working else nodes[-1]


def _region(kind: Kind, nodes: list[Node], results: list[Value]) -> tuple[Graph, tuple[Value, ...]]:
    """The nodes as a region with values of its own, and the values it takes from outside."""
    inner: dict[Value, Value] = {}
    inputs: dict[Value, Value] = {}

    def operand(value: Value) -> Value:
        if value not in inner:
            inner[value] = inputs[value] = Value(value.type, value.name)
        return inner[value]

    body = []
    for node in nodes:
        operands = tuple(map(operand, node.inputs))
        made = tuple(Value(v.type, v.name) for v in node.results)
        inner.update(zip(node.results, made, strict=True))
        body.append(replace(node, inputs=operands, results=made))
    region = Graph(kind.value, tuple(inputs.values()), tuple(body), tuple(inner[v] for v in results))
    return region, tuple(inputs)
