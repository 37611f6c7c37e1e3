"""JoinProducts: fuse the products before and after a kernel over rows into it, so that the rows never leave the chip (flash attention)."""

from __future__ import annotations

import bisect
import math
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from tpuflow.chips import Chip
from tpuflow.errors import CompileError
from tpuflow.isa.contraction import Contraction, Labels
from tpuflow.lower.emit.region import Region
from tpuflow.lower.emit.rows import emit_rows
from tpuflow.lower.emit.site import Site
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.ops import ELEMENTWISE, PRODUCTS
from tpuflow.lower.graph.products import block_of, contraction_of, sizes_of
from tpuflow.lower.graph.rows import rows_in
from tpuflow.lower.passes.analysis import dataflow_order, depending
from tpuflow.lower.passes.base import ChipPass
from tpuflow.lower.passes.forms import Form, form_of
from tpuflow.lower.passes.kernel_cost import MAX_NODES, busy_seconds, rows_at_once
from tpuflow.lower.passes.region_builder import RegionBuilder, bytes_of, is_kernel
from tpuflow.lower.passes.unit_seconds import held_seconds


@dataclass(frozen=True, slots=True)
class JoinProducts(ChipPass):
    """Fuse products that make or consume rows into the kernel that works on these rows: attention, and its gradients.

    Before: %2 = fused{dot} %q, %k; %3 = fused{reduce max; sub; exp; reduce add; div} %2; %4 = fused{dot} %3, %v.
    After:  %4 = fused{dot; reduce max; sub; exp; reduce add; div; dot} %q, %k, %v.
    Needs: fused graph, rows joined.    Keeps: every operation and every rounding; products are summed in the blocks that they have.
    Never: where the tiles do not fit on the chip, or where the kernels would take more time; recomputing rows instead of storing them may
    take as long as moving them `HELD_MOVES` times, or any time in a program that does not fit otherwise (`saves_memory`).
    """

    saves_memory: bool = False

    def saving_memory(self) -> JoinProducts:
        """This pass for a program that does not fit."""
        return replace(self, saves_memory=True)

    def __call__(self, graph: Graph) -> Graph:
        joining = _Joining(graph, [self.map_regions(node) for node in graph.nodes], self.chip, saves_memory=self.saves_memory)
        return replace(graph, nodes=joining.joined())


class _Joining:
    """The nodes of a graph by position (None: fused into another), with the position that defines and those that read every value."""

    def __init__(self, graph: Graph, nodes: Sequence[Node], chip: Chip, *, saves_memory: bool) -> None:
        self.nodes: list[Node | None] = list(nodes)
        self.outputs, self.chip, self.saves_memory = set(graph.outputs), chip, saves_memory
        self.fits_cache: dict[Form, bool] = {}
        self.refused: set[Hashable] = set()  # forms of kernels that cannot be fused into one, or that it does not pay to
        self.defined_at: dict[Value, int] = {}
        self.readers: dict[Value, list[int]] = {}
        self._index()

    def joined(self) -> tuple[Node, ...]:
        """The nodes after all profitable fusions."""
        for change in (self._join_neighbour, self._join_rows, self._recompute_in_later_rows, self._recompute_for_sums, self._join_rows):
            at = 0
            while at < len(self.nodes):
                at += not (is_rows(self.nodes[at]) and change(at))
        return tuple(n for n in self.nodes if n is not None)

    def _replace(self, *new: Mapping[int, Node | None]) -> bool:
        """Put other nodes at positions, and all in an order in which what a node reads precedes it. Whether there is one; if not, nothing
        changes.
        """
        changed = {at: node for some in new for at, node in some.items()}
        before = {at: self.nodes[at] for at in changed}
        self._put(changed)
        if all(node is None or self._is_in_order(at, node) for at, node in changed.items()):
            return True
        order = dataflow_order(self.nodes)
        if order is None:
            self._put(before)
            return False
        self.nodes = [self.nodes[at] for at in order]
        self._index()
        return True

    def _put(self, changed: Mapping[int, Node | None]) -> None:
        """Put nodes at positions, and keep the index up to date."""
        for old, at in ((old, at) for at in changed if (old := self.nodes[at]) is not None):
            for value in dict.fromkeys(old.inputs):
                self.readers[value].remove(at)
            for value in old.results:
                del self.defined_at[value]
        for at, node in changed.items():
            self.nodes[at] = node
            for value in dict.fromkeys(node.inputs if node is not None else ()):
                bisect.insort(self.readers.setdefault(value, []), at)
            self.defined_at.update(dict.fromkeys(node.results if node is not None else (), at))

    def _is_in_order(self, at: int, node: Node) -> bool:
        """Whether what a node at a position reads precedes it, and what reads it follows."""
        read = (self.defined_at.get(v, -1) for v in node.inputs)
        return max(read, default=-1) < at and all(at < i for v in node.results for i in self.readers.get(v, ()))

    def _index(self) -> None:
        self.defined_at, self.readers = {}, {}
        for at, node in enumerate(self.nodes):
            for value in dict.fromkeys(node.inputs if node is not None else ()):
                self.readers.setdefault(value, []).append(at)
            self.defined_at.update(dict.fromkeys(node.results if node is not None else (), at))

    # --- what rows come from and go into --------------------------------------------------------------------------------

    def _join_neighbour(self, at: int) -> bool:
        """Fuse a neighbouring product into the row kernel at a position, if that is profitable; whether one was fused."""
        rows = self._node(at)
        for other in sorted(self._makers(at).union(*(self.readers.get(v, ()) for v in rows.results))):
            if _is_neighbour(self._node(other), rows, before=other < at) and self._join(at, other, set()):
                return True
        return False

    def _join_rows(self, at: int) -> bool:
        """Fuse a later kernel over the same rows that shares an operand with this one or reads its results, if that is profitable."""
        rows = self._node(at)
        values, linked = (*rows.inputs, *rows.results), set[int]()
        beside = {i for v in values for i in self.readers.get(v, ()) if i > at and is_rows(self.nodes[i])}
        return any(self._join(at, other, linked) for other in sorted(i for i in beside if _same_rows(rows, self._node(i))))

    def _join(self, at: int, other: int, linked: set[int]) -> bool:
        """Fuse two kernels into one, if that is profitable and there is an order with it; `linked` as for `_are_linked`."""
        members = min(at, other), max(at, other)
        if self._are_linked(*members, linked) or (form := self._form(members)) in self.refused:
            return False
        found = self._merged(members)
        if found is None or not self._pays([found[1]], [self._node(at) for at in members]):
            self.refused.add(form)
            return False
        return self._replace(dict.fromkeys(members), dict([found]))

    def _are_linked(self, first: int, last: int, linked: set[int]) -> bool:
        """Whether a kernel depends on an earlier one by way of others, so that both as one would depend on themselves, as those of two
        layers do, which may well share an operand. `linked`: kernels that are known to depend on the first one, which grows.

        The order of all nodes would say so, too, after a time that depends on how many there are.
        """
        left, visited = [*self._makers(last) - {first}], set[int]()
        while left:
            at = left.pop()
            if at < first or at in visited:
                continue
            makers = self._makers(at)
            if at in linked or first in makers:
                linked.add(last)
                return True
            visited.add(at)
            left += makers
        return False

    def _makers(self, at: int) -> set[int]:
        """The positions of the nodes that make what the one at a position reads."""
        return {self.defined_at[v] for v in self._node(at).inputs if v in self.defined_at}

    def _form(self, members: Iterable[int]) -> Hashable:
        """What decides whether kernels are fused: their structure, which operands and results they share, and which results others read.

        Layers are alike, and their kernels often share an operand, as a mask: so are most pairs.
        """
        members, inside = sorted(members), set(members)
        nodes = [self._node(at) for at in members]
        numbers: dict[Value, int] = {}
        shared = [numbers.setdefault(v, len(numbers)) for node in nodes for v in (*node.inputs, *node.results)]
        stored = [self._is_stored(v, inside) for node in nodes for v in node.results]
        return tuple(map(form_of, nodes)), tuple(shared), tuple(stored)

    def _is_stored(self, result: Value, inside: Container[int]) -> bool:
        """Whether others than the kernels at positions `inside` read a result of theirs."""
        return result in self.outputs or any(at not in inside for at in self.readers.get(result, ()))

    def _node(self, at: int) -> Node:
        node = self.nodes[at]
        assert node is not None, "a node that was fused into another defines and reads nothing"
        return node

    def _merged(self, members: Sequence[int], recomputation: _Recomputation | None = None) -> tuple[int, Node] | None:
        """(position, kernel) of several kernels merged into one, with the results that others read; None if there is no such kernel.

        With a `recomputation`, the kernel computes that value instead of reading it.
        """
        members, inside = sorted(members), set(members)
        results = [v for at in members for v in self._node(at).results]
        place = self._place(members, recomputation)
        builder = RegionBuilder()
        made = {} if recomputation is None else recomputation.computed(builder)
        for at in members:
            made |= dict(zip(self._node(at).results, builder.inline_region(self._node(at), made), strict=True))
        stored = [v for v in results if self._is_stored(v, inside)]
        like = next((node for at in members if is_rows(node := self._node(at))), self._node(members[-1]))
        like = replace(like, attrs=MappingProxyType({**like.attrs, "kind": Kind.ROWS}))
        one = builder.fused(like, [made[v] for v in stored], stored)
        return (place, one) if _is_possible(one, self.chip) and self._fits(one) else None

    def _place(self, members: Sequence[int], recomputation: _Recomputation | None = None) -> int:
        """The last position, of those of the members, at which one kernel can take the place of all; where others have to move for it, the
        last of all.
        """
        results = [v for at in members for v in self._node(at).results]
        read = {v for at in members for v in self._node(at).inputs}.difference(results)
        read = read if recomputation is None else read.difference([recomputation.value]).union(recomputation.leaves.values())
        after = max((self.defined_at.get(v, -1) for v in read), default=-1)
        before = min((i for v in results for i in self.readers.get(v, ()) if i not in members), default=len(self.nodes))
        return max((at for at in members if after < at < before), default=max(members))

    def _fits(self, node: Node) -> bool:
        """Whether a row kernel can be emitted for the chip, all that it holds at once included; cached by form."""
        form = form_of(node)
        if form not in self.fits_cache:
            site = Site(node, Region.of(node, range(len(node.inputs) + len(node.results))), self.chip, node.scope)
            try:
                plans = emit_rows(site)
                self.fits_cache[form] = bool(plans) and all(plan.fits() for plan in plans)
            except CompileError:
                self.fits_cache[form] = False
        return self.fits_cache[form]

    # --- what is made again rather than stored for somebody else --------------------------------------------------------

    def _recompute_in_later_rows(self, at: int) -> bool:
        """Let a later row kernel recompute rows, with their products, that the kernel at a position stores, if that is profitable."""
        rows = self._node(at)
        for value, readers in self._stored_rows(rows):
            recomputation = _Recomputation.of(rows, value)
            later = {i: None for v in (value, *rows.results) for i in self.readers.get(v, ()) if is_rows(self.nodes[i])}
            for host in later:
                others = [i for i in readers if i != host]
                fits = row_shape(self._node(host)) == value.shape
                if fits and self._recompute_with_readers(recomputation, at, host, others):
                    return True
        return False

    def _stored_rows(self, rows: Node) -> Iterator[tuple[Value, Sequence[int]]]:
        """(rows, positions of their readers): the rows that a kernel with products stores, and that are no outputs of the graph."""
        for value in rows.results if _has_products(rows) else ():
            readers = self.readers.get(value, [])
            if value.shape == row_shape(rows) and value not in self.outputs and readers:
                yield value, readers

    def _recompute_with_readers(self, recomputation: _Recomputation, at: int, host: int, others: Sequence[int]) -> bool:
        """Recompute a value in the row kernel `host`, fused with the products that read it, if that is profitable."""
        if not all(_consumes_rows(self._node(i), recomputation.value) for i in others):
            return False
        return self._recompute_in([host, *others], recomputation, [at])

    def _recompute_in(self, members: Sequence[int], recomputation: _Recomputation, makers: Sequence[int]) -> bool:
        """Merge kernels and recompute in them a value that the kernels at positions `makers` store and read, which become one, if that is
        profitable.
        """
        found, maker, place = self._merged(members, recomputation), recomputation.maker, self._place(makers)
        still_reduces = any(n.op == "reduce" for n in maker.regions[0].nodes)
        if found is None or not still_reduces:
            return False
        if len(makers) > 1 and not (_is_possible(maker, self.chip) and self._fits(maker)):
            return False
        if not self._pays([found[1], maker], [self._node(i) for i in (*makers, *members)], recomputation.value):
            return False
        return self._replace(dict.fromkeys((*makers, *members)), {place: maker}, dict([found]))

    def _recompute_for_sums(self, at: int) -> bool:
        """Let products that contract the rows recompute these, some columns at a time, where whole rows leave no room for the sums; those
        that contract along each row join the kernel that computes the rows first.
        """
        rows = self._node(at)
        for value, readers in self._stored_rows(rows):
            sums = [i for i in readers if _consumes_rows(self._node(i), value, over=True)]
            along = [i for i in readers if i not in sums]
            if sums and all(_consumes_rows(self._node(i), value) for i in along):
                recomputation = _Recomputation.of(rows, value, [self._node(i) for i in along])
                if self._recompute_in(sums, recomputation, [at, *along]):
                    return True
        return False

    def _pays(self, new: Sequence[Node], old: Sequence[Node], freed: Value | None = None) -> bool:
        """Whether kernels `new` are faster than `old`; if the value `freed` is no longer stored, they may be slower by its price."""
        spent, saved = (sum(busy_seconds(n, self.chip) for n in nodes) for nodes in (new, old))
        return spent < saved + (0.0 if freed is None else self._worth(freed))

    def _worth(self, freed: Value) -> float:
        return math.inf if self.saves_memory else held_seconds(bytes_of(freed.type), self.chip)


@dataclass(frozen=True, slots=True)
class _Recomputation:
    """How to recompute rows: by the nodes of their kernel, from `leaves` (value of its region -> value of the graph).

    `own`: the rows in that region. `maker`: that kernel without the rows as a result, but with the per-row values among the leaves, and
    with the products `along` each row that read them there.
    """

    value: Value
    nodes: tuple[Node, ...]
    own: Value
    leaves: Mapping[Value, Value]
    maker: Node

    @classmethod
    def of(cls, rows: Node, value: Value, along: Sequence[Node] = ()) -> _Recomputation:
        """Of a value that a row kernel stores. Reductions are not recomputed: their results, per-row values, are leaves."""
        (region,) = rows.regions
        outer = dict(zip(region.inputs, rows.inputs, strict=True))
        known = dict(zip(region.outputs, rows.results, strict=True))
        own = next(o for o, v in zip(region.outputs, rows.results, strict=True) if v is value)
        want, nodes, leaves = {own}, [], {}
        for node in reversed(region.nodes):
            if want.isdisjoint(node.results):
                continue
            nodes.append(node)
            if node.op == "broadcast" and node.inputs[0] not in outer:
                (left,) = node.inputs
                leaves[left] = known.get(left) or Value(left.type, left.name)
            else:
                want.update(node.inputs)
        stored = {o: v for o, v in known.items() if v is not value} | leaves
        builder = RegionBuilder()
        env = {o: builder.operand(v) for o, v in outer.items()}
        builder.inline(region.nodes, env)
        made = {v: env[o] for o, v in known.items()}
        for product in along:
            made |= dict(zip(product.results, builder.inline_region(product, made), strict=True))
        results = [*stored.values(), *(v for product in along for v in product.results)]
        maker = builder.fused(rows, [*(env[o] for o in stored), *(made[v] for v in results[len(stored) :])], results)
        return cls(value, tuple(reversed(nodes)), own, {o: v for o, v in outer.items() if o in want} | leaves, maker)

    def computed(self, builder: RegionBuilder) -> dict[Value, Value]:
        """Add the recomputation to a region: {the value of the graph: its name there}."""
        env = {o: builder.operand(v) for o, v in self.leaves.items()}
        builder.inline(self.nodes, env)
        return {self.value: env[self.own]}


def is_rows(node: Node | None) -> bool:
    """Whether a node is a kernel over rows."""
    return node is not None and is_kernel(node, Kind.ROWS)


def _same_rows(one: Node, other: Node) -> bool:
    """Whether two row kernels with products have rows of one shape, reduced along the same axes."""
    mine, others = rows_in(one), rows_in(other)
    return (mine.shape, mine.axes) == (others.shape, others.axes) and _has_products(one) and _has_products(other)


def _has_products(node: Node) -> bool:
    return any(n.op in PRODUCTS for n in node.regions[0].nodes)


def row_shape(rows: Node) -> tuple[int, ...]:
    """The shape of the rows of a kernel."""
    return rows_in(rows).shape


def _is_neighbour(other: Node, rows: Node, *, before: bool) -> bool:
    """Whether a kernel is a product that makes the rows (`before`), or one that consumes them."""
    if not is_kernel(other, Kind.DOT):
        return False
    if not before:
        return any(_consumes_rows(other, v) for v in rows.results if v.shape == row_shape(rows))
    (work,), dot = rows.regions, _plain_product(other)
    made = {o for o, v in zip(work.inputs, rows.inputs, strict=True) if v in other.results}
    whole = all(_reads_elementwise(n) for n in work.nodes if not made.isdisjoint(n.inputs))
    return dot is not None and dot.result.shape == row_shape(rows) and whole and _has_one_row_axis(rows)


def _has_one_row_axis(rows: Node) -> bool:
    """Whether rows are reduced along a single axis."""
    return all(len(n.attrs["axes"]) == 1 for n in rows.regions[0].nodes if n.op == "reduce")


def _consumes_rows(product: Node, value: Value, *, over: bool = False) -> bool:
    """Whether a product reads a value, unconverted, as rows: it contracts along each row, or across rows, whose other axes are batches
    then. over: only the latter counts.
    """
    dot = _plain_product(product)
    if dot is None:
        return False
    (region,) = product.regions
    whole, own = contraction_of(dot), {o for o, v in zip(region.inputs, product.inputs, strict=True) if v is value}
    taken = [labels for v, labels in zip(dot.inputs, (whole.lhs, whole.rhs), strict=True) if v in own]
    only = all(n is dot for n in region.nodes if not own.isdisjoint(n.inputs))
    return only and len(taken) == 1 and (_contracts_rows(taken[0], whole) or (not over and whole.contracted == taken[0][-1:]))


def _plain_product(node: Node) -> Node | None:
    """The dot of a product kernel that may be fused with rows: more than one row, column and contracted element, no sums of results."""
    (region,) = node.regions if is_kernel(node, Kind.DOT) else (None,)
    dot = next((n for n in region.nodes if n.op == "dot"), None) if region is not None else None
    if region is None or dot is None or any(n.op == "reduce" for n in region.nodes) or not _has_contiguous_blocks(dot):
        return None
    whole, sizes = contraction_of(dot), sizes_of(dot)
    sides = [math.prod(sizes[x] for x in labels) for labels in whole.roles[1:]]
    return dot if 1 not in sides and 0 not in sizes.values() else None


def _contracts_rows(rows: Labels, whole: Contraction) -> bool:
    """Whether a product contracts across rows, and all other axes of the rows are batches."""
    return len(whole.contracted) == 1 and {*rows[:-1]} == {*whole.batch, *whole.contracted}


def _has_contiguous_blocks(dot: Node) -> bool:
    """Whether the blocks of a product's sum lie along one axis, or there is only one block."""
    sizes = sizes_of(dot)
    block = block_of(dot)
    return len(block) == 1 or all(n == sizes[x] for x, n in block.items())


def _reads_elementwise(node: Node) -> bool:
    return node.op in ELEMENTWISE or node.op in ("reduce", *PRODUCTS)


def _is_possible(node: Node, chip: Chip) -> bool:
    """Whether a kernel is a valid row kernel, whose outputs are rows, per-row values and results of products, and fits on the chip."""
    (region,) = node.regions
    rows = rows_in(node)
    left = tuple(n for axis, n in enumerate(rows.shape) if axis not in rows.axes)
    one_side = all(sum(v in rows.values for v in (*n.inputs, n.result)) == 1 for n in region.nodes if n.op in PRODUCTS)
    after = depending(region.nodes, [n.result for n in rows.consumers])
    apart = all(after.isdisjoint(n.inputs) for n in region.nodes if n.op in ("reduce", "broadcast", *PRODUCTS))
    # a gate and what it lets through come from two products
    of_one = sum(len(depending(region.nodes, n.results)) for n in rows.consumers) == len(after)
    placed = all(o in after or o.shape in (rows.shape, left) for o in region.outputs)
    return one_side and apart and of_one and placed and len(region.nodes) <= MAX_NODES and bool(rows_at_once(node, chip))
