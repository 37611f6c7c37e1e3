"""Rematerialize: recompute in a later kernel what would be live across the memory peak, from values that are live there anyway; or fetch it
again from the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from tpuflow.chips import Chip
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.memories import at_host, is_fetch
from tpuflow.lower.graph.ops import ELEMENTWISE, ENTRIES, PRODUCTS
from tpuflow.lower.passes.analysis import effectful
from tpuflow.lower.passes.base import ChipPass
from tpuflow.lower.passes.kernel_cost import MAX_NODES, roofline_seconds, row_bytes, uses_elementwise
from tpuflow.lower.passes.node_seconds import put_seconds
from tpuflow.lower.passes.ordering import VIEWS
from tpuflow.lower.passes.region_builder import RegionBuilder, bytes_of, fits_on_chip, is_kernel
from tpuflow.lower.passes.unit_seconds import FILLED_SHARE, held_seconds, move_seconds, start_seconds

SEPARATE = -1  # in place of a kernel's position: a new kernel
_STEPS = {Kind.DOT: PRODUCTS, Kind.REDUCE: ("reduce",), Kind.ROWS: ("reduce",)}


@dataclass(frozen=True, slots=True)
class Rematerialize(ChipPass):
    """Let kernels after the memory peak recompute a value that is computed before it, if its operands are live there as well.

    All its late readers recompute it, or one of them (or a kernel of its own) does and stores it for the others. What has come back from
    the host comes back again for its late readers.
    Before: %1, %2 = fused{dot; convert; gelu} %x, %w; ...; %8 = fused{dot; gelu'} %y, %v, %1; %9 = fused{dot} %2, %z.
    After:  %1, %2 = fused{dot; convert; gelu} %x, %w; ...; %8, %3 = fused{dot; gelu'; gelu} %y, %v, %1; %9 = fused{dot} %3, %z.
    Needs: fused graph.    Keeps: every operation and every rounding, so every bit.
    Never: extends lifetimes by as many bytes as it frees, or repeats a product or a reduction; nor, where the program fits on the chip
    anyway, takes more time than moving the freed bytes `HELD_MOVES` times. `saves_memory`: it is known not to fit.
    """

    saves_memory: bool = False

    def saving_memory(self) -> Rematerialize:
        """This pass for a program that does not fit."""
        return replace(self, saves_memory=True)

    def __call__(self, graph: Graph) -> Graph:
        nodes = [self.map_regions(node) for node in graph.nodes]
        live = _LiveValues.of(graph, nodes, self.chip, saves_memory=self.saves_memory)
        while live.sweep():
            pass
        return replace(graph, nodes=tuple(n for n in live.nodes if n.results or n.op != "fused"))


@dataclass(frozen=True, slots=True)
class _Cone:
    """A backward slice of a kernel's region, which recomputes a value: its nodes in order, and the values from which they start."""

    nodes: tuple[Node, ...]
    leaves: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """One way to recompute a value: the kernels at positions `makers` do it for themselves, or a single maker (SEPARATE: a new kernel)
    stores it for `others`; `seconds` is the cost.
    """

    makers: tuple[int, ...]
    others: tuple[int, ...]
    seconds: float


@dataclass(slots=True)
class _LiveValues:
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
    def of(cls, graph: Graph, nodes: Sequence[Node], chip: Chip, *, saves_memory: bool) -> _LiveValues:
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

    def _peak(self) -> tuple[int, int]:
        """Where most of HBM is held, and how much, inputs included; outputs of an input's type are taken to have that one's place."""
        given, host = {v.type for v in self.graph.inputs}, at_host(self.nodes)
        change = np.zeros(len(self.nodes) + 2, np.int64)
        for value, node in self.maker.items():
            if value not in self.root and value not in host and not (value in self.outputs and value.type in given):
                at = self.place[node]
                change[at] += bytes_of(value.type)
                change[max(self.last_read(value), at) + 1] -= bytes_of(value.type)
        held = np.cumsum(change)
        return int(held.argmax()), int(held.max()) + sum(bytes_of(v.type) for v in self.graph.inputs if v not in host)

    def last_read(self, value: Value) -> int:
        """The position of the last node that reads a value, directly or through views; that after the last node for outputs."""
        root = self.root.get(value, value)
        if root in self.kept:
            return len(self.nodes)
        return max((self.place[node] for v in (root, *self.views.get(root, ())) for node in self.readers.get(v, ())), default=-1)

    def sweep(self) -> bool:
        """Rematerialize the values that are live at the peak where that is profitable, largest first; whether anything changed."""
        self.peak, peak_bytes = self._peak()
        self.is_over_limit = self.saves_memory or peak_bytes > FILLED_SHARE * self.chip.available_hbm_bytes
        live = [v for node in self.nodes for v in node.results if self.is_live_at_peak(v)]
        changed = [self._rematerialize(v) for v in sorted(live, key=lambda v: -bytes_of(v.type))]
        return any(changed)

    def is_live_at_peak(self, value: Value) -> bool:
        """Whether a value is live at the peak for later readers only, none of which is a view."""
        maker, readers = self.maker.get(value), self.readers.get(value, ())
        if maker is None or not self.place[maker] < self.peak < self.last_read(value) or self.nodes[self.peak] in readers:
            return False
        return not any(node.op in VIEWS for node in readers)

    def _rematerialize(self, value: Value) -> bool:
        if not self.is_live_at_peak(value):
            return False
        late = [i for i in self.read_at(value) if i > self.peak]
        if is_fetch(self.maker[value]):
            return self._fetch_again(value, late)
        if (recomputation := _Recomputation.of(self, value)) is None:
            return False
        plan = min(recomputation.plans(late), key=lambda p: p.seconds, default=None)
        if plan is None:
            return False
        peak = self.nodes[self.peak]
        recomputation.apply(plan)
        self.peak = self.place[peak]
        return True

    def _fetch_again(self, value: Value, late: Sequence[int]) -> bool:
        """Put a value that others have read back from the host once more for its late readers, where that is worth the host's link."""
        fetch = self.maker[value]
        limit = math.inf if self.is_over_limit else held_seconds(bytes_of(value.type), self.chip)
        if value in self.outputs or len(late) == len(self.readers[value]) or put_seconds(fetch, self.chip) > limit:
            return False
        again = fetch.on(fetch.inputs, (Value(value.type, value.name),))
        for i in late:
            node = self.nodes[i]
            self.put(i, replace(node, inputs=tuple(again.result if v is value else v for v in node.inputs)))
        self.insert(late[0], again)
        return True

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


@dataclass(slots=True)
class _Recomputation:
    """A value that the kernel at position `at` stores, and the cone that recomputes it; `outer`: value of its region -> of the graph."""

    live: _LiveValues
    value: Value
    at: int
    cone: _Cone
    outer: dict[Value, Value] = field(default_factory=dict)

    @classmethod
    def of(cls, live: _LiveValues, value: Value) -> _Recomputation | None:
        """The recomputation of a value, if there is one without a product or a reduction."""
        at = live.place[live.maker[value]]
        node = live.nodes[at]
        if not is_kernel(node, Kind.MAP, Kind.REDUCE, Kind.DOT, Kind.ROWS) or value in live.outputs:
            return None
        (region,) = node.regions
        if len({*region.outputs}) < len(region.outputs):
            return None
        own = next(o for o, v in zip(region.outputs, node.results, strict=True) if v is value)
        outer = dict(zip(region.inputs, node.inputs, strict=True)) | dict(zip(region.outputs, node.results, strict=True))
        stays = {o for o, v in outer.items() if v is not value and (o in region.inputs or live.last_read(v) > live.peak)}
        cone = _cone(region, own, stays)
        if cone is None or own in cone.leaves or not any(n.op in ELEMENTWISE for n in cone.nodes):
            return None
        return cls(live, value, at, cone, {leaf: outer.get(leaf) or Value(leaf.type, leaf.name) for leaf in cone.leaves} | {own: value})

    @property
    def leaves(self) -> list[Value]:
        """The values of the graph from which the recomputation starts."""
        return list(dict.fromkeys(self.outer[leaf] for leaf in self.cone.leaves))

    def plans(self, late: Sequence[int]) -> Iterator[_Plan]:
        """The profitable plans: every late reader recomputes the value; a new kernel does; or one that reads the largest leaf does."""
        nodes = self.live.nodes
        if all(uses_elementwise(nodes[i], self.value) for i in late):
            yield from self._priced(late, [])
        yield from self._priced([SEPARATE], late)
        if not self.cone.leaves:
            return
        largest = max(self.leaves, key=lambda v: bytes_of(v.type))
        for i in self.live.read_at(largest):
            others = [j for j in late if j != i]
            able = i > self.live.peak and others and _iterates_over(nodes[i], self.value) and uses_elementwise(nodes[i], largest)
            if able and (i not in late or uses_elementwise(nodes[i], self.value)):
                yield from self._priced([i], others)

    def _priced(self, makers: Sequence[int], others: Sequence[int]) -> Iterator[_Plan]:
        """The plan, if it lowers the peak, raises live memory nowhere else, and is worth its time."""
        freed = self._freed(min(others) if makers == [SEPARATE] else max(makers))
        rid = not {*self.live.read_at(self.value)} - {*makers, *others}
        if freed <= 0 or (rid and not _keeps_kind(_without_result(self.live.nodes[self.at], self.value))):
            return
        if others and makers != [SEPARATE] and self.live.order_with_earlier(makers[0], others) is None:
            return
        chip = self.live.chip
        limit = math.inf if self.live.is_over_limit else held_seconds(freed, chip)
        spent = -move_seconds(bytes_of(self.value.type), chip) if rid else 0.0
        for i in makers:
            new = self._separate_kernel() if i == SEPARATE else self._with_recomputation(self.live.nodes[i], stores=bool(others))
            if spent > limit or not _is_possible(new, chip):
                return
            before = -start_seconds(chip) if i == SEPARATE else roofline_seconds(self.live.nodes[i], chip)
            spent += roofline_seconds(new, chip) - before
        if spent <= limit:
            yield _Plan(tuple(makers), tuple(others), spent)

    def _freed(self, last: int) -> int:
        """Bytes freed at the peak, less the leaves that must then stay live until the kernel at a position."""
        longer = sum(bytes_of(v.type) for v in self.leaves if self.live.last_read(v) < last)
        return bytes_of(self.value.type) - longer

    def apply(self, plan: _Plan) -> None:
        """Apply a plan to the graph."""
        live, alone = self.live, plan.makers == (SEPARATE,)
        order = live.order_with_earlier(plan.makers[0], plan.others) if plan.others and not alone else None
        live.put(self.at, self._with_stored_leaves(live.nodes[self.at]))
        stores = bool(plan.others)
        made = [self._separate_kernel()] if alone else [self._with_recomputation(live.nodes[i], stores=stores) for i in plan.makers]
        for i in plan.others:
            node = live.nodes[i]
            live.put(i, replace(node, inputs=tuple(made[0].results[-1] if v is self.value else v for v in node.inputs)))
        if alone:
            live.insert(min(plan.others), made[0])
        else:
            for i, node in zip(plan.makers, made, strict=True):
                live.put(i, node)
        if order is not None:
            live.reorder([live.nodes[i] for i in order])
        if not live.readers[self.value]:
            at = live.place[live.maker[self.value]]
            live.put(at, _without_result(live.nodes[at], self.value))

    def _separate_kernel(self) -> Node:
        """A new kernel that only recomputes and stores the value."""
        builder = RegionBuilder()
        env = {leaf: builder.operand(self.outer[leaf]) for leaf in self.cone.leaves}
        builder.inline(self.cone.nodes, env)
        own = next(o for o, v in self.outer.items() if v is self.value)
        like = replace(self.live.nodes[self.at], attrs=MappingProxyType({"kind": Kind.MAP}))
        return builder.fused(like, [env[own]], [Value(self.value.type, self.value.name)])

    def _with_recomputation(self, node: Node, *, stores: bool) -> Node:
        """A kernel that recomputes the value instead of reading it; if it `stores` it, as its last result."""
        builder = RegionBuilder()
        env = {leaf: builder.operand(self.outer[leaf]) for leaf in self.cone.leaves}
        builder.inline(self.cone.nodes, env)
        own = next(o for o, v in self.outer.items() if v is self.value)
        outputs = builder.inline_region(node, {self.value: env[own]})
        if not stores:
            return builder.fused(node, outputs, node.results)
        return builder.fused(node, [*outputs, env[own]], [*node.results, Value(self.value.type, self.value.name)])

    def _with_stored_leaves(self, node: Node) -> Node:
        """The kernel that computed the value first, which now also stores the leaves that it did not store."""
        (region,) = node.regions
        known = {*region.inputs, *region.outputs}
        new = [leaf for leaf in self.cone.leaves if leaf not in known]
        grown = replace(region, outputs=(*region.outputs, *new))
        return replace(node, results=(*node.results, *(self.outer[leaf] for leaf in new)), regions=(grown,))


def _cone(region: Graph, own: Value, stays: set[Value]) -> _Cone | None:
    """The cone of a region's value, up to values that stay in memory anyway and to reductions and products, which become leaves."""
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
            (leaves.update if node.op in ENTRIES else stack.extend)(dict.fromkeys(node.inputs))
    return _Cone(tuple(n for n in region.nodes if n in nodes), tuple(leaves))


def _narrows_product(node: Node, made: dict[Value, Node]) -> bool:
    """Whether a node narrows the result of a reduction or product: then the narrow value is the better leaf."""
    if node.op != "convert" or node.result.dtype.bytes > node.inputs[0].dtype.bytes:
        return False
    maker = made.get(node.inputs[0])
    return maker is not None and maker.op in ("reduce", *PRODUCTS)


def _iterates_over(node: Node, value: Value) -> bool:
    """Whether a kernel's iteration space has the shape of a value, so that it could also compute and store that."""
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


def _keeps_kind(node: Node) -> bool:
    """Whether a kernel still has the operation of its kind (a product, a reduction), or no results at all."""
    steps = _STEPS.get(node.attrs["kind"], ())
    return not steps or not node.results or any(n.op in steps for n in node.regions[0].nodes)


def _is_possible(node: Node, chip: Chip) -> bool:
    """Whether tiles of all operands and results of a kernel fit on the chip."""
    (region,) = node.regions
    rows = row_bytes([node], chip) <= chip.vmem_bytes if is_kernel(node, Kind.ROWS) else True
    return rows and len(region.nodes) <= MAX_NODES and fits_on_chip(v.type for v in (*node.inputs, *node.results))


def _without_result(node: Node, value: Value) -> Node:
    """A kernel without one of its results."""
    builder = RegionBuilder()
    kept = [(o, v) for o, v in zip(builder.inline_region(node), node.results, strict=True) if v is not value]
    return builder.fused(node, [o for o, _ in kept], [v for _, v in kept])
