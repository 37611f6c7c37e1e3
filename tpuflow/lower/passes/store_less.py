"""StoreLess: kernels store fewer bytes, and their readers recompute the rest elementwise (fusion into consumers)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tpuflow.chips import Chip
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.ops import ENTRIES, PRODUCTS
from tpuflow.lower.passes.base import ChipPass
from tpuflow.lower.passes.kernel_cost import uses_elementwise
from tpuflow.lower.passes.region_builder import RegionBuilder, bytes_of, fits_on_chip, is_kernel
from tpuflow.lower.passes.unit_seconds import move_seconds, work_seconds

NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class StoreLess(ChipPass):
    """Let readers recompute a kernel's elementwise results from narrower or fewer arrays that it stores instead, if that saves time.

    Before: %2, %3 = fused{dot; convert; mul; sub} %x, %w, %y; %4 = fused{reduce} %2, %3.
    After:  %1 = fused{dot; convert} %x, %w; %4 = fused{mul; sub; reduce} %1, %y.
    Needs: fused graph.    Keeps: every operation and every rounding, so every bit.
    Never: stores more bytes, keeps more in memory, or computes a product or a reduction twice.
    """

    def __call__(self, graph: Graph) -> Graph:
        nodes = [self.map_regions(node) for node in graph.nodes]
        return replace(graph, nodes=tuple(_Kernels(graph, nodes, self.chip).rewritten()))


@dataclass(frozen=True, slots=True)
class _Plan:
    """A change of a kernel's results: `dropped` are no longer stored, `stored` (a value of its region, or None) is instead;
    `gain`: seconds saved.
    """

    dropped: tuple[Value, ...]
    stored: Value | None
    gain: float


@dataclass(slots=True)
class _Cone:
    """A backward slice of the producer's region that a reader recomputes: its nodes, and the values of that region that it reads."""

    nodes: dict[Node, None] = field(default_factory=dict)
    leaves: dict[Value, None] = field(default_factory=dict)


class _Kernels:
    """Visits kernels from last to first, so that a reader that recomputes may in turn become smaller by its own producers."""

    def __init__(self, graph: Graph, nodes: Sequence[Node], chip: Chip) -> None:
        self.nodes, self.chip = list(nodes), chip
        self.position = {id(node): i for i, node in enumerate(nodes)}
        replaced = {v.type for v in graph.outputs}
        self.replaced = {v for v in graph.inputs if v.type in replaced}
        self.outputs = set(graph.outputs)
        self.readers: dict[Value, dict[int, None]] = {}
        for i, node in enumerate(self.nodes):
            self._index(i, node)

    def _index(self, i: int, node: Node) -> None:
        for value in node.inputs:
            self.readers.setdefault(value, {})[i] = None

    def rewritten(self) -> list[Node]:
        """The nodes after all profitable changes."""
        for at in reversed(range(len(self.nodes))):
            while is_kernel(self.nodes[at], Kind.MAP, Kind.REDUCE, Kind.DOT) and (plan := _Producer(self, at).plan()) is not None:
                self._apply(at, plan)
        return [n for n in self.nodes if n.results or n.op != "fused"]

    def _apply(self, at: int, plan: _Plan) -> None:
        maker = _Producer(self, at)
        outer = dict(maker.outer)
        if plan.stored is not None and plan.stored not in outer:
            outer[plan.stored] = Value(plan.stored.type, plan.stored.name)
        dropped = set(plan.dropped)
        for i in sorted({i for v in dropped for i in self.readers[v]}):
            self._replace(i, maker.with_recomputation(self.nodes[i], dropped, outer))
        kept = {own: value for own, value in outer.items() if value not in dropped}
        self._replace(at, maker.with_results(kept))

    def _replace(self, i: int, node: Node) -> None:
        for value in self.nodes[i].inputs:
            self.readers[value].pop(i, None)
        self.nodes[i] = node
        self._index(i, node)

    def last_read(self, value: Value) -> int:
        """The position of the last reader of a value."""
        return NEVER if value in self.outputs else max(self.readers.get(value, ()), default=-1)


class _Producer:
    """A kernel whose results may be dropped. `outer`: output of its region -> result; `operand`: input of its region -> operand."""

    def __init__(self, kernels: _Kernels, at: int) -> None:
        self.kernels, self.at, self.node = kernels, at, kernels.nodes[at]
        (self.region,) = self.node.regions
        self.outer = dict(zip(self.region.outputs, self.node.results, strict=True))
        self.own = {value: own for own, value in self.outer.items()}
        self.operand = dict(zip(self.region.inputs, self.node.inputs, strict=True))
        self.made = {v: n for n in self.region.nodes for v in n.results}

    def plan(self) -> _Plan | None:
        """The change that saves most time, if any does."""
        if any(n.op == "join" for n in self.region.nodes) or len(self.own) != len(self.node.results):
            return None
        free = [v for v in self.node.results if self._is_recomputable(v)]
        if not free:
            return None
        plans = [p for s in self._candidates(free[0].shape) if (p := self._plan_with(s, free)) is not None]
        return max(plans, key=lambda p: p.gain, default=None)

    def _is_recomputable(self, value: Value) -> bool:
        """Whether all readers of a result are kernels that could recompute it."""
        readers = self.kernels.readers.get(value, {})
        return value not in self.kernels.outputs and bool(readers) and all(uses_elementwise(self.kernels.nodes[i], value) for i in readers)

    def _candidates(self, shape: tuple[int, ...]) -> list[Value | None]:
        """What could be stored instead of results: nothing new (None), or the result of a product, a reduction or a conversion."""
        steps = (*PRODUCTS, "reduce", "convert")
        new = [n.result for n in self.region.nodes if n.op in steps and n.result.shape == shape and n.result not in self.outer]
        return [None, *new]

    def _plan_with(self, stored: Value | None, free: Sequence[Value]) -> _Plan | None:
        """The best set of results to drop if `stored` is stored."""
        dropped = self._derivable(stored, free)
        gain = self._gain(stored, dropped)
        for value in dropped:
            fewer = [v for v in dropped if v is not value]
            if (better := self._gain(stored, fewer)) > gain:
                dropped, gain = fewer, better
        return _Plan(tuple(dropped), stored, gain) if dropped and gain > 0 else None

    def _derivable(self, stored: Value | None, free: Sequence[Value]) -> list[Value]:
        """The results that can be computed from `stored`, the operands and the results that stay."""
        dropped = list(free)
        while stuck := [v for v in dropped if self.cone([v], set(dropped), stored) is None]:
            dropped.remove(stuck[0])
        return [v for v in dropped if self.own[v] is not stored]

    def cone(self, values: Iterable[Value], dropped: set[Value], stored: Value | None) -> _Cone | None:
        """The cone that recomputes results; None if it contains a product, a reduction or a broadcast within the region."""
        cone = _Cone()
        stack = [self.own[v] for v in values]
        while stack:
            value = stack.pop()
            if value is stored or (value in self.outer and self.outer[value] not in dropped) or value in self.operand:
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

    def _gain(self, stored: Value | None, dropped: Sequence[Value]) -> float:
        """Seconds saved by dropping results, less what readers then spend to read and recompute; negative if more bytes would be live."""
        if not dropped:
            return 0.0
        dropped_set = set(dropped)
        new = stored is not None and stored not in self.outer
        saved = sum(bytes_of(v.type) for v in dropped) - (bytes_of(stored.type) if new and stored is not None else 0)
        work, longer = 0.0, {stored: None} if new and stored is not None else {}
        for i in {i for v in dropped for i in self.kernels.readers[v]}:
            reader = self.kernels.nodes[i]
            cone = self.cone([v for v in dropped if v in reader.inputs], dropped_set, stored)
            if cone is None:
                return -1.0
            extra = [leaf for leaf in cone.leaves if self.outer_value(leaf) not in reader.inputs]
            read = [v for v in reader.inputs if v not in dropped] + extra
            if len(extra) > 1 and not fits_on_chip(v.type for v in (*read, *reader.results)):
                return -1.0
            saved += sum(bytes_of(v.type) for v in dropped if v in reader.inputs) - sum(bytes_of(v.type) for v in extra)
            work += work_seconds(cone.nodes, self.kernels.chip)
            for leaf in extra:
                if self._is_dead_before(leaf, i):
                    longer[leaf] = None
        grown = sum(bytes_of(v.type) for v in longer)
        if grown > sum(bytes_of(v.type) for v in dropped):
            return -1.0
        copied = sum(bytes_of(v.type) for v in longer if self.outer_value(v) in self.kernels.replaced)
        return move_seconds(saved - 2 * copied, self.kernels.chip) + self._spared_seconds(dropped, stored) - work

    def _is_dead_before(self, leaf: Value, i: int) -> bool:
        value = self.outer_value(leaf)
        return value is not None and self.kernels.last_read(value) < i

    def _spared_seconds(self, dropped: Sequence[Value], stored: Value | None) -> float:
        """Seconds of the vector unit that this kernel no longer spends."""
        kept = [own for own, value in self.outer.items() if value not in set(dropped)]
        alive = _needed(self.region, kept if stored is None else [*kept, stored])
        return work_seconds((n for n in self.region.nodes if n.op not in PRODUCTS and n not in alive), self.kernels.chip)

    def outer_value(self, leaf: Value) -> Value | None:
        """The graph's value of a leaf; None if it is not stored yet."""
        return self.operand.get(leaf) or self.outer.get(leaf)

    def with_recomputation(self, reader: Node, dropped: set[Value], outer: dict[Value, Value]) -> Node:
        """The reader, which recomputes the dropped results that it used to read."""
        mine = [v for v in reader.inputs if v in dropped]
        stays = {own for own, value in outer.items() if value not in dropped}
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

    def with_results(self, kept: dict[Value, Value]) -> Node:
        """This kernel with the results `kept` (value of its region -> value of the graph)."""
        builder = RegionBuilder()
        env = {own: builder.operand(value) for own, value in self.operand.items()}
        builder.inline(self.region.nodes, env)
        return builder.fused(self.node, [env[own] for own in kept], list(kept.values()))


def _needed(region: Graph, outputs: Iterable[Value]) -> set[Node]:
    """The nodes of a region from which some values are computed."""
    want, found = set(outputs), set()
    for node in reversed(region.nodes):
        if not want.isdisjoint(node.results):
            found.add(node)
            want.update(node.inputs)
    return found
