"""Outlining: groups of nodes become `fused` nodes. Decides which values are stored, and which a kernel recomputes instead of reading."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tpuflow.chips import Chip
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.ops import ELEMENTWISE, ENTRIES, PRODUCTS
from tpuflow.lower.passes.grouping import Group, Grouping
from tpuflow.lower.passes.ordering import in_order
from tpuflow.lower.passes.unit_seconds import (
    move_seconds,
    product_seconds,
    start_seconds,
    step_bytes,
    times_read,
    total_bytes,
    work_seconds,
)
from tpuflow.lower.tiling import SHORTEST_SIDES, SLOTS

_DATA_MOVEMENT = frozenset(("convert", "broadcast", "window", "reshape", "full", "iota", "bitcast"))


@dataclass(slots=True)
class _Kernel:
    """The cost of a kernel under construction: what it reads and stores, its seconds of the vector unit, and the nodes it recomputes."""

    reads: set[Value]
    stored_bytes: int
    work: float
    recomputed: set[Node] = field(default_factory=set)

    def seconds(self, chip: Chip) -> float:
        """The kernel's time: vector work overlaps with memory traffic."""
        return max(move_seconds(total_bytes(self.reads) + self.stored_bytes, chip), self.work)

    def with_recomputed(self, value: Value, cone: Collection[Node], sources: set[Value], work: float) -> _Kernel:
        """The cost if the kernel recomputes a value, by the nodes `cone` from `sources`, instead of reading it."""
        return _Kernel(self.reads - {value} | sources, self.stored_bytes, self.work + work, self.recomputed.union(cone))

    def update(self, other: _Kernel) -> None:
        """Take over the cost of another."""
        self.reads, self.work, self.recomputed = other.reads, other.work, other.recomputed


class Outline:
    """Builds the fused nodes of a grouping, last group first, so that it is known which values of a group later ones read from memory."""

    def __init__(self, grouping: Grouping, chip: Chip) -> None:
        self.grouping, self.chip = grouping, chip
        self.users: dict[Value, list[Node]] = {}
        for node in grouping.position:
            for value in node.inputs:
                self.users.setdefault(value, []).append(node)
        self.stored = set(grouping.outputs)
        self.recomputed: set[Node] = set()

    def build(self) -> list[Node]:
        """The nodes that replace the region's, each with everything it needs before it, otherwise in program order."""
        position = self.grouping.position
        first = {group: min(position[n] for n in group.nodes) for group in self.grouping.groups}
        ranked: list[tuple[int, Node]] = []
        for group in sorted(first, key=lambda g: (-g.level, -first[g])):
            node = group.nodes[0] if group.kind is None else self._fused(group, group.kind)
            if node is not None:
                self.stored.update(node.inputs)
                ranked.append((first[group], node))
        return in_order(node for _, node in sorted(ranked, key=lambda entry: entry[0]))

    def _fused(self, group: Group, kind: Kind) -> Node | None:
        results = [v for n in self._sorted(group.nodes) for v in n.results if v in self.stored]
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
        """The nodes that compute the results: the group's own, inlined ones, and recomputed ones of other groups."""
        found: dict[Node, None] = {}
        refused: dict[tuple[Node, Node], None] = {}
        kernel = _Kernel(set(group.reads), total_bytes(results), work_seconds(group.nodes, self.chip))
        taken = [self.grouping.maker[v] for v in results]
        while taken:
            refused |= self._reach(group, taken, kernel, found)
            # asked again: it may share what it reads with what has been accepted since
            taken = [maker for user, maker in refused if maker not in found and self._computes(group, user, maker, kernel)]
        return list(found)

    def _reach(self, group: Group, stack: list[Node], kernel: _Kernel, found: dict[Node, None]) -> dict[tuple[Node, Node], None]:
        """Add nodes and their cones to `found`; (user, producer) pairs for operands that are read from memory instead."""
        refused: dict[tuple[Node, Node], None] = {}
        while stack:
            node = stack.pop()
            if node in found:
                continue
            found[node] = None
            if node.op in ENTRIES:
                continue  # its operand is always read from memory
            for maker in [m for v in node.inputs if (m := self.grouping.maker.get(v)) is not None]:
                if self._computes(group, node, maker, kernel):
                    stack.append(maker)
                else:
                    refused[node, maker] = None
        return refused

    def _computes(self, group: Group, user: Node, maker: Node, kernel: _Kernel) -> bool:
        """Whether the kernel of `group` computes an operand of `user` itself instead of reading it."""
        made_in = self.grouping.group_of.get(maker)
        if made_in is None or made_in is group:
            return True
        if maker.op not in ELEMENTWISE or self._must_store(maker.result):
            return False
        if maker in kernel.recomputed:
            return True
        if maker.op == "convert" and self._converts_on_read(maker):
            return True
        return user.op not in PRODUCTS and made_in.kind is Kind.MAP and self._recomputes(group, maker, made_in, kernel)

    def _recomputes(self, group: Group, maker: Node, made_in: Group, kernel: _Kernel) -> bool:
        """Whether to recompute a value of a map: if it has no other reader, or if that takes no longer than storing and reading it."""
        value, cone = maker.result, self._cone(maker, made_in)
        changed = kernel.with_recomputed(value, cone, self._sources(cone), work_seconds(cone, self.chip))
        longer = changed.seconds(self.chip) - kernel.seconds(self.chip)
        if not self._only_for(cone, value, group) and longer > self._storing_seconds(value, made_in):
            return False
        kernel.update(changed)
        self.recomputed.update(cone)
        return True

    def _sources(self, cone: Mapping[Node, None]) -> set[Value]:
        """The arrays in memory from which nodes are computed."""
        leaves = {v for n in cone for v in n.inputs if self.grouping.maker.get(v) not in cone}
        return {s for v in leaves if (s := self.grouping.source(v)) is not None}

    def _storing_seconds(self, value: Value, made_in: Group) -> float:
        """A reader's share of the time to store a value: a move with its start-up, or a whole kernel if it exists for that value only."""
        readers = len(self._readers(value) - {made_in}) or 1
        alone = self.stored.isdisjoint(v for n in made_in.nodes for v in n.results)
        started = start_seconds(self.chip) if alone else self.chip.dma_seconds
        return (move_seconds(total_bytes([value]), self.chip) + started) / readers

    def _readers(self, value: Value) -> set[Group]:
        """The kernels that use a value, including those that recompute its users: in a chain of sums, all later ones."""
        found: set[Group] = set()
        stack, seen = [value], {value}
        while stack:
            for user in self.users.get(stack.pop(), ()):
                if (group := self.grouping.group_of.get(user)) is not None:
                    found.add(group)
                if user in self.recomputed:
                    stack += [v for v in user.results if v not in seen]
                    seen.update(user.results)
        return found

    def _must_store(self, value: Value) -> bool:
        """Whether a value is stored in any case: already decided, or read by a node that cannot recompute it."""
        return value in self.stored or any(self._reads_memory(node, value) for node in self.users[value])

    def _reads_memory(self, node: Node, value: Value) -> bool:
        if node.op in PRODUCTS:
            maker = self.grouping.maker[value]
            return not (maker.op == "convert" and self._converts_on_read(maker))
        return node.op in ENTRIES or self.grouping.group_of[node].kind is None

    def _converts_on_read(self, convert: Node) -> bool:
        """Whether a reader should convert for itself: the operand is narrower, or it is stored anyway and a narrow copy would not pay; and
        what a step of a product reads has room on the chip in both types.
        """
        operand = convert.inputs[0]
        if self.grouping.source(operand) is not operand:
            return False
        products = [n for n in self.users[convert.result] if n.op in PRODUCTS]
        if any(self._crowds(n, convert) for n in products):
            return False
        made_in = self.grouping.group(operand)
        stored = made_in is None or made_in.kind is None or operand in self.stored
        return operand.dtype.bytes < convert.result.dtype.bytes or (stored and not self._is_worth_storing(convert))

    def _crowds(self, product: Node, convert: Node) -> bool:
        """Whether an operand, converted in a product's kernel, leaves no room there for the shortest tile of the other that is tried."""
        value, side = convert.result, SHORTEST_SIDES * self.chip.matrix_columns
        tiles = [step_bytes(product, value, self.chip, v.dtype.bytes) for v in (convert.inputs[0], value)]
        tiles += [step_bytes(product, v, self.chip, v.dtype.bytes, side) for v in product.inputs if v is not value]
        return SLOTS * sum(tiles) > self.chip.vmem_bytes

    def _is_worth_storing(self, convert: Node) -> bool:
        """Whether a narrower copy of a stored operand saves products, which read it once per tile, more time than it costs."""
        wide, narrow = total_bytes(convert.inputs), total_bytes(convert.results)
        own_kernel = self.grouping.group_of[convert] is not self.grouping.group(convert.inputs[0])
        saved = sum(self._slowdown_seconds(n, convert.result, wide - narrow) for n in self.users[convert.result] if n.op in PRODUCTS)
        making = move_seconds(narrow + (wide if own_kernel else 0), self.chip) + (start_seconds(self.chip) if own_kernel else 0.0)
        return saved > making

    def _slowdown_seconds(self, product: Node, operand: Value, more_bytes: int) -> float:
        """By how many seconds a product is slower if an operand has `more_bytes` more."""
        more = product_seconds(product, self.chip, times_read(product, operand) * more_bytes)
        return more - product_seconds(product, self.chip)

    def _cone(self, maker: Node, group: Group) -> dict[Node, None]:
        """The cone of a node within its group: the node and what it is computed from, up to stored values."""
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
        """Whether `group` is the only user of a cone's results."""
        inside = all(user in cone for n in cone if n.result is not value for user in self.users[n.result])
        return inside and all(self.grouping.group_of.get(user) is group for user in self.users[value])


def _main(kind: Kind, nodes: list[Node]) -> Node:
    """The node that gives a fused node its scope and source line: its product or reduction, else the last computation with a scope."""
    steps = PRODUCTS if kind is Kind.DOT else (kind.value,)
    working = [n for n in nodes if n.op in steps] or [n for n in reversed(nodes) if n.op not in _DATA_MOVEMENT]
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
        made = tuple([Value(v.type, v.name) for v in node.results])
        inner.update(zip(node.results, made, strict=True))
        body.append(node.on(operands, made))
    region = Graph(kind.value, tuple(inputs.values()), tuple(body), tuple(inner[v] for v in results))
    return region, tuple(inputs)
