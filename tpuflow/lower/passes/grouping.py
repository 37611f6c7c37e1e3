"""Grouping for fusion: every node joins a group that becomes one kernel.

A group's level is higher than those of all groups that it reads, so that no fusion closes a cycle. Nodes join groups greedily in program
order, in time linear in the size of the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.ops import ELEMENTWISE, ENTRIES, PRODUCTS
from tpuflow.lower.passes.analysis import CONTROL, effectful

INLINED = frozenset((*ENTRIES, "full", "iota"))  # duplicated in every kernel that uses them
MAX_NODES = 256
MAX_INPUTS = 24
FIRST = (Kind.MAP, Kind.REDUCE, Kind.DOT)
"""The kinds that single nodes open: the others are made of these."""


@dataclass(slots=True, eq=False)
class Group:
    """Nodes that will be one kernel, or (of no kind) one node that stays as it is.

    `shape` is that of everything the group can give to others.
    """

    kind: Kind | None
    shape: tuple[int, ...]
    level: int
    nodes: list[Node] = field(default_factory=list)
    reads: dict[Value, None] = field(default_factory=dict)
    consumers: dict[Group, None] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        """Whether the kernel would get too large for the on-chip memory."""
        return len(self.nodes) >= MAX_NODES or (self.shape != () and len(self.reads) >= MAX_INPUTS)


class Grouping:
    """The groups of one region. `group_of`: node -> group; nodes without a group are inlined into every user.

    `stored`: inlined values that must be in memory all the same (outputs, operands of opaque nodes) -> the result of a map kernel.
    """

    def __init__(self, graph: Graph) -> None:
        self.maker: dict[Value, Node] = {}
        self.position: dict[Node, int] = {}
        self.groups: list[Group] = []
        self.group_of: dict[Node, Group] = {}
        self.stored: dict[Value, Value] = {}
        self._readers: dict[Value, list[Group]] = {}
        self._last_effect = 0
        self._splats: Group | None = None
        self._scalars: list[Group] = []
        for i, node in enumerate(graph.nodes):
            self._add(node, i)
        self.outputs = tuple(self._store(v) for v in graph.outputs)

    def source(self, value: Value) -> Value | None:
        """What a kernel that uses `value` reads from memory: itself, the operand of a broadcast, or nothing."""
        node = self.maker.get(value)
        if node is None or node.op not in INLINED or node in self.group_of:
            return value
        return self.source(node.inputs[0]) if node.inputs else None

    def group(self, value: Value) -> Group | None:
        """The group that makes a value; None for region inputs."""
        node = self.maker.get(value)
        return None if node is None else self.group_of.get(node)

    def level(self, value: Value | None) -> int:
        """The level of what must be in memory before `value` can be used."""
        source = None if value is None else self.source(value)
        group = None if source is None else self.group(source)
        return 0 if group is None else group.level

    # --- nodes ------------------------------------------------------------------------------------------------------

    def _add(self, node: Node, position: int) -> None:
        if node.op in ENTRIES or not (node.op in INLINED or node.op in ELEMENTWISE or node.op in ("reduce", "join")):
            node = node.on(tuple([self._operand(node, i) for i in range(len(node.inputs))]), node.results)
        self._know(node, position)
        if node.op in INLINED:
            return
        if node.op in ELEMENTWISE:
            self._join(node, self._elementwise_group(node, node.result.shape))
        elif node.op == "join":
            self._join(node, self._elementwise_group(node, node.inputs[0].shape, kinds=(Kind.MAP,)))
        elif node.op == "reduce":
            self._join(node, self._reduce_group(node))
        else:
            self._join(node, self._own_group(node))

    def _operand(self, node: Node, i: int) -> Value:
        """Operand i of a broadcast, product or opaque node as an array in memory; a padding splat stays one (it becomes an immediate)."""
        value = node.inputs[i]
        maker = self.maker.get(value)
        if node.op == "pad" and i == 1 and maker is not None and maker.op == "full":
            return self._copy(maker, self._new(None, (), 1))
        return self._store(value, fresh=node.op in CONTROL)

    def _know(self, node: Node, position: int) -> None:
        self.position[node] = position
        for value in node.results:
            self.maker[value] = node

    def _own_group(self, node: Node) -> Group:
        """A dot opens a group for its epilogue; anything else stays as it is, effects in order."""
        level = 1 + max((self.level(v) for v in node.inputs), default=0)
        if effectful(node):
            level = self._last_effect = max(level, self._last_effect + 1)
        shape = node.results[0].shape if node.results else ()
        return self._new(Kind.DOT if node.op in PRODUCTS else None, shape, level)

    def _new(self, kind: Kind | None, shape: tuple[int, ...], level: int) -> Group:
        self.groups.append(Group(kind, shape, level))
        return self.groups[-1]

    def _join(self, node: Node, group: Group) -> None:
        group.nodes.append(node)
        self.group_of[node] = group
        for value in node.inputs:
            source = self.source(value)
            maker = None if source is None else self.group(source)
            if source is None or maker is group:
                continue
            group.reads[source] = None
            self._readers.setdefault(source, []).append(group)
            if maker is not None:
                maker.consumers[group] = None

    def _store(self, value: Value, *, fresh: bool = False) -> Value:
        """The value as an array in memory; one that is inlined elsewhere is made by a map of its own (for loops: by each its own)."""
        node = self.maker.get(value)
        if node is None or node.op not in INLINED or node in self.group_of:
            return value
        if value in self.stored and not fresh:
            return self.stored[value]
        need = max((self.level(v) for v in node.inputs), default=0)
        splat = not value.shape and node.op == "full"
        copy = self._copy(node, self._splat_group() if splat else self._new(Kind.MAP, value.shape, need + 1))
        return copy if fresh else self.stored.setdefault(value, copy)

    def _copy(self, node: Node, group: Group) -> Value:
        """The result of the same node over again, in a group."""
        copy = node.on(node.inputs, (Value(node.result.type, node.result.name),))
        self._know(copy, self.position[node])
        self._join(copy, group)
        return copy.result

    # --- which group ------------------------------------------------------------------------------------------------

    def _elementwise_group(self, node: Node, shape: tuple[int, ...], kinds: Collection[Kind] = FIRST) -> Group:
        """The group of the operand made last if the node can follow it there; else one that reads the same; else a new one."""
        makers = {g: None for v in node.inputs if (g := self._direct_group(v, shape)) is not None and g.kind in kinds}
        if not shape and len(makers) > 1 and any(g.kind is not Kind.MAP for g in makers):
            makers = {}  # an epilogue would make one kernel wait for the other, and neither could be merged with its like
        for group in sorted(makers, key=lambda g: (-g.level, g.kind is Kind.MAP)):
            if group.kind is not None and self._can_follow(node, group):  # one that was tried before may have absorbed it in vain
                return group
        need = max((self.level(v) for v in node.inputs), default=0)
        if not shape:
            return self._scalar_group(need)
        return self._sibling(node, shape, need) or self._new(Kind.MAP, shape, need + 1)

    def _direct_group(self, value: Value, shape: tuple[int, ...]) -> Group | None:
        group = self.group(value)
        fits = group is not None and group.kind is not None and group.shape == shape and not group.full
        return group if fits and not self._from_memory(value, group) else None

    def _from_memory(self, value: Value, group: Group | None) -> bool:
        """Whether a group makes a value that its own kernel could only read from memory: one that is stretched, or joined from pieces."""
        source = self.source(value)
        made_here = source is not None and group is not None and self.group(source) is group
        return made_here and (source is not value or self.maker[value].op == "join")

    def _can_follow(self, node: Node, group: Group) -> bool:
        """Whether all other operands are there before the group runs, perhaps after merging groups or moving this one up."""
        others = {g: None for v in node.inputs if (g := self._maker_of(v)) is not None and g is not group}
        if any(self._from_memory(v, group) for v in node.inputs):
            return False
        return all(other.level < group.level or self._absorb(group, other, node) or self._raise(group, other.level + 1) for other in others)

    def _maker_of(self, value: Value) -> Group | None:
        source = self.source(value)
        return None if source is None else self.group(source)

    def _absorb(self, group: Group, other: Group, node: Node) -> bool:
        """Merge a map of the same level and shape, which neither reads the group nor is read by it."""
        direct = any(self.group(v) is other for v in node.inputs) and other.shape == group.shape
        apart = any(self._from_memory(v, other) for v in node.inputs)
        if other.kind is not Kind.MAP or other.level != group.level or not direct or apart:
            return False
        if len(group.nodes) + len(other.nodes) > MAX_NODES or (group.shape and len(group.reads) + len(other.reads) > MAX_INPUTS):
            return False
        for moved in other.nodes:
            self.group_of[moved] = group
        group.nodes += other.nodes
        group.reads.update(other.reads)
        group.consumers.update(other.consumers)
        for source in other.reads:
            self._readers[source].append(group)
            if (maker := self.group(source)) is not None:
                maker.consumers.pop(other, None)
                maker.consumers[group] = None
        self.groups.remove(other)
        other.kind = None
        return True

    def _raise(self, group: Group, level: int) -> bool:
        """Move a group up, if everything that reads it is higher still."""
        if any(consumer.level <= level for consumer in group.consumers):
            return False
        group.level = level
        return True

    def _scalar_group(self, need: int) -> Group:
        """The lowest scalar kernel above `need`: 0-d work anywhere at one level is one kernel."""
        found = [g for g in self._scalars if g.kind is Kind.MAP and g.level > need and not g.full]
        if not found:
            self._scalars.append(self._new(Kind.MAP, (), need + 1))
        return min(found or self._scalars[-1:], key=lambda g: g.level)

    def _splat_group(self) -> Group:
        """All stored 0-d splats are one kernel, apart from computed scalars: it can leave loops, what it makes can be updated in place."""
        if self._splats is None or self._splats.full:
            self._splats = self._new(Kind.MAP, (), 1)
        return self._splats

    def _sibling(self, node: Node, shape: tuple[int, ...], need: int) -> Group | None:
        """A map of the same shape that reads one of the operands too (0-d and stretched ones do not count)."""
        for value in node.inputs:
            if value.shape != shape or self.source(value) is not value:
                continue
            for group in self._readers.get(value, ()):
                if group.kind is Kind.MAP and group.shape == shape and group.level > need and not group.full:
                    return group
        return None

    def _reduce_group(self, node: Node) -> Group:
        """A reduction of the same axes of the same operand, or of another value of the operand's kernel; else a new one."""
        (value,), axes = node.inputs, node.attrs["axes"]
        need = self.level(value)
        for group in self._reduce_candidates(value):
            first = next(n for n in group.nodes if n.op == "reduce")
            alike = first.attrs["axes"] == axes and first.inputs[0].shape == value.shape
            if alike and group.level > need and not group.full:
                return group
        return self._new(Kind.REDUCE, node.result.shape, need + 1)

    def _reduce_candidates(self, value: Value) -> Iterator[Group]:
        made = self.group(value)
        sources = [value] if made is None or made.kind is None else [value, *(v for n in made.nodes for v in n.results)]
        for source in sources:
            yield from (g for g in self._readers.get(source, ()) if g.kind is Kind.REDUCE and any(n.op == "reduce" for n in g.nodes))
