"""Rematerialize: recompute in a later kernel what would be live across the memory peak, from values that are live there anyway; or fetch it
again from the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from tpuflow.chips import Chip
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.memories import is_fetch
from tpuflow.lower.graph.ops import ELEMENTWISE, ENTRIES, PRODUCTS
from tpuflow.lower.passes.base import ChipPass
from tpuflow.lower.passes.kernel_cost import MAX_NODES, roofline_seconds, row_bytes, uses_elementwise
from tpuflow.lower.passes.live_values import LiveValues
from tpuflow.lower.passes.node_seconds import put_seconds
from tpuflow.lower.passes.region_builder import RegionBuilder, bytes_of, fits_on_chip, is_kernel
from tpuflow.lower.passes.unit_seconds import move_seconds, start_seconds

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
        live = LiveValues.of(graph, nodes, self.chip, saves_memory=self.saves_memory)
        while _sweep(live):
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


def _sweep(live: LiveValues) -> bool:
    """Rematerialize the values that are live at the peak where that is profitable, largest first; whether anything changed."""
    live.find_peak()
    held = [v for node in live.nodes for v in node.results if live.is_live_at_peak(v)]
    changed = [_rematerialize(live, v) for v in sorted(held, key=lambda v: -bytes_of(v.type))]
    return any(changed)


def _rematerialize(live: LiveValues, value: Value) -> bool:
    if not live.is_live_at_peak(value):
        return False
    late = [i for i in live.read_at(value) if i > live.peak]
    if is_fetch(live.maker[value]):
        return _fetch_again(live, value, late)
    if (recomputation := _Recomputation.of(live, value)) is None:
        return False
    plan = min(recomputation.plans(late), key=lambda p: p.seconds, default=None)
    if plan is None:
        return False
    peak = live.nodes[live.peak]
    recomputation.apply(plan)
    live.peak = live.place[peak]
    return True


def _fetch_again(live: LiveValues, value: Value, late: Sequence[int]) -> bool:
    """Put a value that others have read back from the host once more for its late readers, where that is worth the host's link."""
    fetch = live.maker[value]
    if value in live.outputs or len(late) == len(live.readers[value]):
        return False
    if put_seconds(fetch, live.chip) > live.worth_seconds(bytes_of(value.type)):
        return False
    again = fetch.on(fetch.inputs, (Value(value.type, value.name),))
    for i in late:
        node = live.nodes[i]
        live.put(i, replace(node, inputs=tuple(again.result if v is value else v for v in node.inputs)))
    live.insert(late[0], again)
    return True


@dataclass(slots=True)
class _Recomputation:
    """A value that the kernel at position `at` stores, and the cone that recomputes it; `outer`: value of its region -> of the graph."""

    live: LiveValues
    value: Value
    at: int
    cone: _Cone
    outer: dict[Value, Value] = field(default_factory=dict)

    @classmethod
    def of(cls, live: LiveValues, value: Value) -> _Recomputation | None:
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
        limit = self.live.worth_seconds(freed)
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
