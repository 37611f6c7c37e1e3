"""StoreLess: kernels hand on as few bytes as their readers can do with, and the readers compute the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tpuflow.chips import Chip
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.ops import PRODUCTS
from tpuflow.lower.passes.base import ChipPass
from tpuflow.lower.passes.kernel_cost import uses_elementwise
from tpuflow.lower.passes.region_builder import RegionBuilder, bytes_of, fits_on_chip, is_kernel
from tpuflow.lower.passes.unit_seconds import move_seconds, work_seconds

ENTRIES = frozenset(("broadcast", "window"))
NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class StoreLess(ChipPass):
    """Let kernels compute what they read, element by element, from narrower or fewer arrays that another kernel has or could have stored.

    Before: %2, %3 = fused{dot; convert; mul; sub} %x, %w, %y; %4 = fused{reduce} %2, %3.
    After:  %1 = fused{dot; convert} %x, %w; %4 = fused{mul; sub; reduce} %1, %y.
    Needs: fused graph.    Keeps: every operation and every rounding, so every bit.
    Never: stores more bytes, keeps more in memory, or computes a product or a reduction twice.
    """

    def __call__(self, graph: Graph) -> Graph:
        nodes = [self.map_regions(node) for node in graph.nodes]
        return replace(graph, nodes=tuple(_Moving(graph, nodes, self.chip).moved()))


@dataclass(frozen=True, slots=True)
class _Plan:
    """What changes about a kernel's results: `gone` are not stored any more, `stored` (of its region) is, and what that saves."""

    gone: tuple[Value, ...]
    stored: Value | None
    gain: float


@dataclass(slots=True)
class _Cone:
    """What a reader computes anew: nodes of the maker's region, and the values that it reads for them (outer or results; or `stored`)."""

    nodes: dict[Node, None] = field(default_factory=dict)
    leaves: dict[Value, None] = field(default_factory=dict)


class _Moving:
    """Walks the kernels from the last to the first, so that what a reader takes over may come from further up in turn."""

    def __init__(self, graph: Graph, nodes: Sequence[Node], chip: Chip) -> None:
        self.nodes, self.chip = list(nodes), chip
        self.position = {id(node): i for i, node in enumerate(nodes)}
        replaced = {v.type for v in graph.outputs}
        self.replaced = {v for v in graph.inputs if v.type in replaced}
        self.outputs = set(graph.outputs)
        self.readers: dict[Value, dict[int, None]] = {}
        for i, node in enumerate(self.nodes):
            self._reads(i, node)

    def _reads(self, i: int, node: Node) -> None:
        for value in node.inputs:
            self.readers.setdefault(value, {})[i] = None

    def moved(self) -> list[Node]:
        """The nodes after all that pays."""
        for at in reversed(range(len(self.nodes))):
            while is_kernel(self.nodes[at], Kind.MAP, Kind.REDUCE, Kind.DOT) and (plan := _Maker(self, at).plan()) is not None:
                self._carry_out(at, plan)
        return [n for n in self.nodes if n.results or n.op != "fused"]

    def _carry_out(self, at: int, plan: _Plan) -> None:
        maker = _Maker(self, at)
        outer = dict(maker.outer)
        if plan.stored is not None and plan.stored not in outer:
            outer[plan.stored] = Value(plan.stored.type, plan.stored.name)
        gone = set(plan.gone)
        for i in sorted({i for v in gone for i in self.readers[v]}):
            self._replace(i, maker.taken_over(self.nodes[i], gone, outer))
        kept = {own: value for own, value in outer.items() if value not in gone}
        self._replace(at, maker.storing(kept))

    def _replace(self, i: int, node: Node) -> None:
        for value in self.nodes[i].inputs:
            self.readers[value].pop(i, None)
        self.nodes[i] = node
        self._reads(i, node)

    def last_read(self, value: Value) -> int:
        """The position of the last reader of a value."""
        return NEVER if value in self.outputs else max(self.readers.get(value, ()), default=-1)


class _Maker:
    """A kernel whose results may be too many: `outer` maps values of its region to those they leave it as."""

    def __init__(self, moving: _Moving, at: int) -> None:
        self.moving, self.at, self.node = moving, at, moving.nodes[at]
        (self.region,) = self.node.regions
        self.outer = dict(zip(self.region.outputs, self.node.results, strict=True))
        self.own = {value: own for own, value in self.outer.items()}
        self.operand = dict(zip(self.region.inputs, self.node.inputs, strict=True))
        self.made = {v: n for n in self.region.nodes for v in n.results}

    def plan(self) -> _Plan | None:
        """The change that saves most, if any does."""
        if any(n.op == "join" for n in self.region.nodes) or len(self.own) != len(self.node.results):
            return None
        free = [v for v in self.node.results if self._may_go(v)]
        if not free:
            return None
        plans = [p for s in self._candidates(free[0].shape) if (p := self._with(s, free)) is not None]
        return max(plans, key=lambda p: p.gain, default=None)

    def _may_go(self, value: Value) -> bool:
        """Whether all that read a result are kernels that could compute it."""
        readers = self.moving.readers.get(value, {})
        return value not in self.moving.outputs and bool(readers) and all(uses_elementwise(self.moving.nodes[i], value) for i in readers)

    def _candidates(self, shape: tuple[int, ...]) -> list[Value | None]:
        """What might be stored in place of results: nothing new, or what a product, a reduction or a conversion makes."""
        steps = (*PRODUCTS, "reduce", "convert")
        new = [n.result for n in self.region.nodes if n.op in steps and n.result.shape == shape and n.result not in self.outer]
        return [None, *new]

    def _with(self, stored: Value | None, free: Sequence[Value]) -> _Plan | None:
        """The best set of results to do without if `stored` is there."""
        gone = self._derivable(stored, free)
        gain = self._gain(stored, gone)
        for value in gone:
            fewer = [v for v in gone if v is not value]
            if (better := self._gain(stored, fewer)) > gain:
                gone, gain = fewer, better
        return _Plan(tuple(gone), stored, gain) if gone and gain > 0 else None

    def _derivable(self, stored: Value | None, free: Sequence[Value]) -> list[Value]:
        """The results that can be computed from `stored`, the operands and the results that stay."""
        gone = list(free)
        while stuck := [v for v in gone if self.cone([v], set(gone), stored) is None]:
            gone.remove(stuck[0])
        return [v for v in gone if self.own[v] is not stored]

    def cone(self, values: Iterable[Value], gone: set[Value], stored: Value | None) -> _Cone | None:
        """What computes results anew; None if a product, a reduction or work of another shape is among it."""
        cone = _Cone()
        stack = [self.own[v] for v in values]
        while stack:
            value = stack.pop()
            if value is stored or (value in self.outer and self.outer[value] not in gone) or value in self.operand:
                cone.leaves[value] = None
                continue
            node = self.made[value]
            if node in cone.nodes:  # shared work is walked once: in the bits of a dropout's key, paths are without number
                continue
            if node.op in (*PRODUCTS, "reduce") or (node.op in ENTRIES and node.inputs[0] not in self.operand):
                return None
            cone.nodes[node] = None
            stack += node.inputs
        return cone

    def _gain(self, stored: Value | None, gone: Sequence[Value]) -> float:
        """Seconds saved, less what it takes to read and compute in their place; negative if more would stay in memory."""
        if not gone:
            return 0.0
        dropped = set(gone)
        new = stored is not None and stored not in self.outer
        saved = sum(bytes_of(v.type) for v in gone) - (bytes_of(stored.type) if new and stored is not None else 0)
        work, longer = 0.0, {stored: None} if new and stored is not None else {}
        for i in {i for v in gone for i in self.moving.readers[v]}:
            reader = self.moving.nodes[i]
            cone = self.cone([v for v in gone if v in reader.inputs], dropped, stored)
            if cone is None:
                return -1.0
            extra = [leaf for leaf in cone.leaves if self.outside(leaf) not in reader.inputs]
            read = [v for v in reader.inputs if v not in dropped] + extra
            if len(extra) > 1 and not fits_on_chip(v.type for v in (*read, *reader.results)):
                return -1.0
            saved += sum(bytes_of(v.type) for v in gone if v in reader.inputs) - sum(bytes_of(v.type) for v in extra)
            work += work_seconds(cone.nodes, self.moving.chip)
            for leaf in extra:
                if self._ends_before(leaf, i):
                    longer[leaf] = None
        grown = sum(bytes_of(v.type) for v in longer)
        if grown > sum(bytes_of(v.type) for v in gone):
            return -1.0
        copied = sum(bytes_of(v.type) for v in longer if self.outside(v) in self.moving.replaced)
        return move_seconds(saved - 2 * copied, self.moving.chip) + self._spared(gone, stored) - work

    def _ends_before(self, leaf: Value, i: int) -> bool:
        outside = self.outside(leaf)
        return outside is not None and self.moving.last_read(outside) < i

    def _spared(self, gone: Sequence[Value], stored: Value | None) -> float:
        """What the vector unit no longer does in this kernel, in seconds."""
        kept = [own for own, value in self.outer.items() if value not in set(gone)]
        alive = _needed(self.region, kept if stored is None else [*kept, stored])
        return work_seconds((n for n in self.region.nodes if n.op not in PRODUCTS and n not in alive), self.moving.chip)

    def outside(self, leaf: Value) -> Value | None:
        """The value of the graph that a leaf is; None of one that is not stored yet."""
        return self.operand.get(leaf) or self.outer.get(leaf)

    def taken_over(self, reader: Node, gone: set[Value], outer: dict[Value, Value]) -> Node:
        """The reader, with what computes the results that it does not find any more."""
        mine = [v for v in reader.inputs if v in gone]
        stays = {own for own, value in outer.items() if value not in gone}
        builder = RegionBuilder()
        stack, nodes, leaves = [self.own[v] for v in mine], set(), {}
        while stack:
            value = stack.pop()
            if value in stays or value in self.operand:
                leaves[value] = builder.operand(outer[value] if value in stays else self.operand[value])
            elif self.made[value] not in nodes:
                nodes.add(self.made[value])
                stack += self.made[value].inputs
        env = dict(leaves)
        builder.inline([n for n in self.region.nodes if n in nodes], env)
        outputs = builder.inline_region(reader, {v: env[self.own[v]] for v in mine})
        return builder.fused(reader, outputs, reader.results)

    def storing(self, kept: dict[Value, Value]) -> Node:
        """This kernel with other results."""
        builder = RegionBuilder()
        env = {own: builder.operand(value) for own, value in self.operand.items()}
        builder.inline(self.region.nodes, env)
        return builder.fused(self.node, [env[own] for own in kept], list(kept.values()))


def _needed(region: Graph, outputs: Iterable[Value]) -> set[Node]:
    """The nodes of a region that some values are made of."""
    want, found = set(outputs), set()
    for node in reversed(region.nodes):
        if not want.isdisjoint(node.results):
            found.add(node)
            want.update(node.inputs)
    return found
