"""Rematerialize: what would lie in memory for a later kernel only is computed again there, from what lies there anyway."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from tpuflow.chips import Chip
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.ops import ELEMENTWISE, PRODUCTS
from tpuflow.lower.passes.analysis import effectful
from tpuflow.lower.passes.base import ChipPass
from tpuflow.lower.passes.kernel_cost import MAX_NODES, roofline_seconds, row_bytes, uses_elementwise
from tpuflow.lower.passes.ordering import VIEWS
from tpuflow.lower.passes.region_builder import RegionBuilder, bytes_of, fits_on_chip, is_kernel
from tpuflow.lower.passes.unit_seconds import FILLED_SHARE, held_seconds, move_seconds, start_seconds

ALONE = -1  # in place of a position: a kernel of its own
STRETCHED = ("broadcast", "window")  # what enters a kernel from memory, in another shape
_STEPS = {Kind.DOT: PRODUCTS, Kind.REDUCE: ("reduce",), Kind.ROWS: ("reduce",)}


@dataclass(frozen=True, slots=True)
class Rematerialize(ChipPass):
    """Let kernels after the fullest moment compute what they would read from before it, where what it is made of is there as well.

    One of them computes it (or a kernel of its own); those that need it in memory read it from there.
    Before: %1, %2 = fused{dot; convert; gelu} %x, %w; ...; %8 = fused{dot; gelu'} %y, %v, %1; %9 = fused{dot} %2, %z.
    After:  %1, %2 = fused{dot; convert; gelu} %x, %w; ...; %8, %3 = fused{dot; gelu'; gelu} %y, %v, %1; %9 = fused{dot} %3, %z.
    Needs: fused graph.    Keeps: every operation and every rounding, so every bit.
    Never: lets what it starts from take as much room as it frees, computes a product or a reduction twice, or, where the program fits on
    the chip without it, takes more time than moving what is held no longer `HELD_MOVES` times.
    """

    def __call__(self, graph: Graph) -> Graph:
        nodes = [self.map_regions(node) for node in graph.nodes]
        held = _Held(graph, nodes, self.chip)
        while held.sweep():
            pass
        return replace(graph, nodes=tuple(n for n in held.nodes if n.results or n.op != "fused"))


@dataclass(frozen=True, slots=True)
class _Cone:
    """What computes a value of a kernel's region again: its nodes in order, and the values that they start from."""

    nodes: tuple[Node, ...]
    leaves: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Kernels that compute a value themselves, or (with `others`) one that stores it for these: at -1, one of its own before them."""

    makers: tuple[int, ...]
    others: tuple[int, ...]
    seconds: float


class _Held:
    """The nodes of a graph, who reads what, and what is held when."""

    def __init__(self, graph: Graph, nodes: Sequence[Node], chip: Chip) -> None:
        self.graph, self.nodes, self.chip = graph, list(nodes), chip
        self.outputs = set(graph.outputs)

    def _look(self) -> None:
        """Find out makers and readers, and who sees a value through a view."""
        self.made_at: dict[Value, int] = {}
        self.readers: dict[Value, list[int]] = {}
        self.root: dict[Value, Value] = {}
        self.last: dict[Value, int] = {}
        for at, node in enumerate(self.nodes):
            for value in dict.fromkeys(node.inputs):
                self.readers.setdefault(value, []).append(at)
                self.last[self.root.get(value, value)] = at
            self.made_at.update(dict.fromkeys(node.results, at))
            if node.op in VIEWS:
                self.root.update((r, self.root.get(v, v)) for v, r in zip(node.inputs, node.results, strict=True))
        self.last.update((self.root.get(v, v), len(self.nodes)) for v in self.graph.outputs)

    def _fullest(self) -> tuple[int, int]:
        """Where most is held, and how much, inputs included; outputs of an input's type are taken to have that one's place."""
        given = {v.type for v in self.graph.inputs}
        change = np.zeros(len(self.nodes) + 2, np.int64)
        for value, at in self.made_at.items():
            if value not in self.root and not (value in self.outputs and value.type in given):
                change[at] += bytes_of(value.type)
                change[self.last.get(value, at) + 1] -= bytes_of(value.type)
        held = np.cumsum(change)
        return int(held.argmax()), int(held.max()) + sum(bytes_of(v.type) for v in self.graph.inputs)

    def last_read(self, value: Value) -> int:
        """The position of the last node that reads a value, through whatever view."""
        return self.last.get(self.root.get(value, value), -1)

    def sweep(self) -> bool:
        """Change what pays about all that is held at the fullest moment, largest first; whether anything did."""
        self._look()
        self.fullest, self.most_bytes = self._fullest()
        self.filled = self.most_bytes > FILLED_SHARE * self.chip.available_hbm_bytes
        held = [v for v in self.made_at if self.is_held(v)]
        changed = [self._held_no_longer(v) for v in sorted(held, key=lambda v: -bytes_of(v.type))]
        return any(changed)

    def is_held(self, value: Value) -> bool:
        """Whether a value is in memory at the fullest moment for later readers only, none of which sees it through a view."""
        readers = self.readers.get(value, ())
        if not self.made_at.get(value, self.fullest) < self.fullest < self.last_read(value) or self.fullest in readers:
            return False
        return not any(self.nodes[i].op in VIEWS for i in readers)

    def _held_no_longer(self, value: Value) -> bool:
        if not self.is_held(value) or (again := _Again.of(self, value)) is None:
            return False
        late = [i for i in self.readers[value] if i > self.fullest]
        plan = min(again.plans(late), key=lambda p: p.seconds, default=None)
        if plan is None:
            return False
        fullest = self.nodes[self.fullest]
        again.carry_out(plan)
        self.fullest = next(i for i, node in enumerate(self.nodes) if node is fullest)
        self._look()
        return True

    def earlier(self, at: int, before: Iterable[int]) -> list[int] | None:
        """An order of all nodes in which one is before some others; None if it needs any of them, or effects would change places."""
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


@dataclass(slots=True)
class _Again:
    """A value that a kernel stores, and how other kernels could compute it: `outer` maps values of its region to those of the graph."""

    held: _Held
    value: Value
    at: int
    cone: _Cone
    outer: dict[Value, Value] = field(default_factory=dict)

    @classmethod
    def of(cls, held: _Held, value: Value) -> _Again | None:
        """How to compute a value again, if there is a way without a product or a reduction."""
        at = held.made_at[value]
        node = held.nodes[at]
        if not is_kernel(node, Kind.MAP, Kind.REDUCE, Kind.DOT, Kind.ROWS) or value in held.outputs:
            return None
        (region,) = node.regions
        if len({*region.outputs}) < len(region.outputs):
            return None
        own = next(o for o, v in zip(region.outputs, node.results, strict=True) if v is value)
        outer = dict(zip(region.inputs, node.inputs, strict=True)) | dict(zip(region.outputs, node.results, strict=True))
        stays = {o for o, v in outer.items() if v is not value and (o in region.inputs or held.last_read(v) > held.fullest)}
        cone = _cone(region, own, stays)
        if cone is None or own in cone.leaves or not any(n.op in ELEMENTWISE for n in cone.nodes):
            return None
        return cls(held, value, at, cone, {leaf: outer.get(leaf) or Value(leaf.type, leaf.name) for leaf in cone.leaves} | {own: value})

    @property
    def leaves(self) -> list[Value]:
        """The values of the graph from which the value is computed."""
        return list(dict.fromkeys(self.outer[leaf] for leaf in self.cone.leaves))

    def plans(self, late: Sequence[int]) -> Iterator[_Plan]:
        """Each late reader computes the value, or a kernel that reads the largest of the leaves does and stores it for the others."""
        nodes = self.held.nodes
        if all(uses_elementwise(nodes[i], self.value) for i in late):
            yield from self._priced(late, [])
        yield from self._priced([ALONE], late)
        if not self.cone.leaves:
            return
        largest = max(self.leaves, key=lambda v: bytes_of(v.type))
        for i in self.held.readers.get(largest, ()):
            others = [j for j in late if j != i]
            able = i > self.held.fullest and others and _has_space_of(nodes[i], self.value) and uses_elementwise(nodes[i], largest)
            if able and (i not in late or uses_elementwise(nodes[i], self.value)):
                yield from self._priced([i], others)

    def _priced(self, makers: Sequence[int], others: Sequence[int]) -> Iterator[_Plan]:
        """The plan, if less is held at the fullest moment, nowhere more, and that is worth the time."""
        freed = self._freed(min(others) if makers == [ALONE] else max(makers))
        rid = not {*self.held.readers[self.value]} - {*makers, *others}
        if freed <= 0 or (rid and not _still_is(_without(self.held.nodes[self.at], self.value))):
            return
        if others and makers != [ALONE] and self.held.earlier(makers[0], others) is None:
            return
        chip = self.held.chip
        limit = math.inf if self.held.filled else held_seconds(freed, chip)
        spent = -move_seconds(bytes_of(self.value.type), chip) if rid else 0.0
        for i in makers:
            new = self._alone() if i == ALONE else self._computing(self.held.nodes[i], stores=bool(others))
            if spent > limit or not _is_possible(new, chip):
                return
            before = -start_seconds(chip) if i == ALONE else roofline_seconds(self.held.nodes[i], chip)
            spent += roofline_seconds(new, chip) - before
        if spent <= limit:
            yield _Plan(tuple(makers), tuple(others), spent)

    def _freed(self, last: int) -> int:
        """How many bytes less are held if what the value is made of stays until the kernel at a position has run."""
        longer = sum(bytes_of(v.type) for v in self.leaves if self.held.last_read(v) < last)
        return bytes_of(self.value.type) - longer

    def carry_out(self, plan: _Plan) -> None:
        """Change the nodes."""
        nodes, alone = self.held.nodes, plan.makers == (ALONE,)
        order = self.held.earlier(plan.makers[0], plan.others) if plan.others and not alone else None
        nodes[self.at] = self._storing_leaves(nodes[self.at])
        made = [self._alone()] if alone else [self._computing(nodes[i], stores=bool(plan.others)) for i in plan.makers]
        for i in plan.others:
            nodes[i] = replace(nodes[i], inputs=tuple(made[0].results[-1] if v is self.value else v for v in nodes[i].inputs))
        if alone:
            nodes.insert(min(plan.others), made[0])
        else:
            for i, node in zip(plan.makers, made, strict=True):
                nodes[i] = node
        if order is not None:
            self.held.nodes = [nodes[i] for i in order]
        if not any(self.value in node.inputs for node in self.held.nodes):
            at = next(i for i, node in enumerate(self.held.nodes) if self.value in node.results)
            self.held.nodes[at] = _without(self.held.nodes[at], self.value)

    def _alone(self) -> Node:
        """A kernel that computes the value and nothing else."""
        builder = RegionBuilder()
        env = {leaf: builder.operand(self.outer[leaf]) for leaf in self.cone.leaves}
        builder.inline(self.cone.nodes, env)
        own = next(o for o, v in self.outer.items() if v is self.value)
        like = replace(self.held.nodes[self.at], attrs=MappingProxyType({"kind": Kind.MAP}))
        return builder.fused(like, [env[own]], [Value(self.value.type, self.value.name)])

    def _computing(self, node: Node, *, stores: bool) -> Node:
        """A kernel that computes the value rather than read it, and stores it too if asked: as its last result."""
        builder = RegionBuilder()
        env = {leaf: builder.operand(self.outer[leaf]) for leaf in self.cone.leaves}
        builder.inline(self.cone.nodes, env)
        own = next(o for o, v in self.outer.items() if v is self.value)
        outputs = builder.inline_region(node, {self.value: env[own]})
        if not stores:
            return builder.fused(node, outputs, node.results)
        return builder.fused(node, [*outputs, env[own]], [*node.results, Value(self.value.type, self.value.name)])

    def _storing_leaves(self, node: Node) -> Node:
        """The kernel that made the value, with results for the leaves that it has not stored so far."""
        (region,) = node.regions
        known = {*region.inputs, *region.outputs}
        new = [leaf for leaf in self.cone.leaves if leaf not in known]
        grown = replace(region, outputs=(*region.outputs, *new))
        return replace(node, results=(*node.results, *(self.outer[leaf] for leaf in new)), regions=(grown,))


def _cone(region: Graph, own: Value, stays: set[Value]) -> _Cone | None:
    """What a value of a region is made of, up to what stays in memory, and to sums and products, which have to."""
    made = {v: n for n in region.nodes for v in n.results}
    nodes, leaves, stack = set(), {}, [own]
    while stack:
        value = stack.pop()
        node = made.get(value)
        if value in stays or node is None or node.op in ("reduce", *PRODUCTS) or _narrows_product(node, made):
            leaves[value] = None
        elif node.op == "join":
            return None
        elif node not in nodes:
            nodes.add(node)
            (leaves.update if node.op in STRETCHED else stack.extend)(dict.fromkeys(node.inputs))
    return _Cone(tuple(n for n in region.nodes if n in nodes), tuple(leaves))


def _narrows_product(node: Node, made: dict[Value, Node]) -> bool:
    """Whether a node makes something narrower of a sum or product, which had better be stored than that."""
    if node.op != "convert" or node.result.dtype.bytes > node.inputs[0].dtype.bytes:
        return False
    maker = made.get(node.inputs[0])
    return maker is not None and maker.op in ("reduce", *PRODUCTS)


def _has_space_of(node: Node, value: Value) -> bool:
    """Whether a kernel could compute and store an array of this shape beside what it does."""
    if not is_kernel(node, Kind.MAP, Kind.DOT, Kind.ROWS):
        return False
    (region,) = node.regions
    if any(n.op == "join" for n in region.nodes):
        return False
    steps = _STEPS.get(node.attrs["kind"])
    if steps is None:
        return region.outputs[0].shape == value.shape
    first = next(n for n in region.nodes if n.op in steps)
    return (first.result if first.op in PRODUCTS else first.inputs[0]).shape == value.shape


def _still_is(node: Node) -> bool:
    """Whether a kernel does what its kind is called after, or nothing at all."""
    steps = _STEPS.get(node.attrs["kind"], ())
    return not steps or not node.results or any(n.op in steps for n in node.regions[0].nodes)


def _is_possible(node: Node, chip: Chip) -> bool:
    """Whether tiles of all that a kernel moves find room on the chip."""
    (region,) = node.regions
    rows = row_bytes([node], chip) <= chip.vmem_bytes if is_kernel(node, Kind.ROWS) else True
    return rows and len(region.nodes) <= MAX_NODES and fits_on_chip(v.type for v in (*node.inputs, *node.results))


def _without(node: Node, value: Value) -> Node:
    """A kernel that does not store one of its results."""
    builder = RegionBuilder()
    kept = [(o, v) for o, v in zip(builder.inline_region(node), node.results, strict=True) if v is not value]
    return builder.fused(node, [o for o, _ in kept], [v for _, v in kept])
