"""JoinProducts: products on both sides of work on rows join its kernel, so that rows between them are in no memory but the chip's."""

from __future__ import annotations

import bisect
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from tpuflow.chips import Chip
from tpuflow.errors import CompileError
from tpuflow.isa.contraction import Contraction, Labels
from tpuflow.lower.emit.region import Region
from tpuflow.lower.emit.repeated import structural_key
from tpuflow.lower.emit.rows import emit_rows
from tpuflow.lower.emit.site import Site
from tpuflow.lower.graph.blocking import depth_block
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.ops import ELEMENTWISE, PRODUCTS
from tpuflow.lower.graph.products import contraction_of, sizes_of
from tpuflow.lower.graph.rows import rows_in
from tpuflow.lower.passes.analysis import depending
from tpuflow.lower.passes.base import ChipPass
from tpuflow.lower.passes.kernel_cost import MAX_NODES, kernel_seconds, rows_at_once
from tpuflow.lower.passes.region_builder import RegionBuilder, bytes_of, is_kernel
from tpuflow.lower.passes.unit_seconds import held_seconds


@dataclass(frozen=True, slots=True)
class JoinProducts(ChipPass):
    """Let a kernel over rows make the products that its rows come from, and those that its rows go into: attention, and its gradients.

    Before: %2 = fused{dot} %q, %k; %3 = fused{reduce max; sub; exp; reduce add; div} %2; %4 = fused{dot} %3, %v.
    After:  %4 = fused{dot; reduce max; sub; exp; reduce add; div; dot} %q, %k, %v.
    Needs: fused graph, rows joined.    Keeps: every operation and every rounding; products are summed in the blocks that they have.
    Never: where a tile of rows with everything that is made of it does not fit on the chip, or where it takes more time: to make rows again
    that were stored, more than moving them `HELD_MOVES` times.
    """

    def __call__(self, graph: Graph) -> Graph:
        joining = _Joining(graph, [self.map_regions(node) for node in graph.nodes], self.chip)
        return replace(graph, nodes=joining.joined())


class _Joining:
    """The nodes of a graph, those that have joined another one being None, and who makes and reads what."""

    def __init__(self, graph: Graph, nodes: Sequence[Node], chip: Chip) -> None:
        self.nodes: list[Node | None] = list(nodes)
        self.outputs, self.chip = set(graph.outputs), chip
        self.fitting: dict[Hashable, bool] = {}
        self.made_at = {v: i for i, node in enumerate(nodes) for v in node.results}
        self.readers: dict[Value, list[int]] = {}
        for i, node in enumerate(nodes):
            for value in dict.fromkeys(node.inputs):
                self.readers.setdefault(value, []).append(i)

    def joined(self) -> tuple[Node, ...]:
        """The nodes after all that pays."""
        for change in (self._joined_with_one, self._joined_with_rows, self._made_again, self._summed_apart, self._joined_with_rows):
            at = 0
            while at < len(self.nodes):
                at += not (is_rows(self.nodes[at]) and change(at))
        return tuple(n for n in self.nodes if n is not None)

    def _replace(self, *new: Mapping[int, Node | None]) -> bool:
        for at, node in ((at, node) for nodes in new for at, node in nodes.items()):
            old, self.nodes[at] = self.nodes[at], node
            for value in dict.fromkeys(old.inputs if old is not None else ()):
                self.readers[value].remove(at)
            for value in dict.fromkeys(node.inputs if node is not None else ()):
                bisect.insort(self.readers.setdefault(value, []), at)
            self.made_at.update(dict.fromkeys(node.results if node is not None else (), at))
        return True

    # --- what rows come from and go into --------------------------------------------------------------------------------

    def _joined_with_one(self, at: int) -> bool:
        """Join a product, or work on the same rows beside products, to the rows at a position if that pays; whether any did."""
        rows = self._node(at)
        makers = {self.made_at[v] for v in rows.inputs if v in self.made_at}
        for other in sorted(makers.union(*(self.readers.get(v, ()) for v in rows.results))):
            if _belongs(self._node(other), rows, before=other < at):
                members = sorted((at, other))
                found = self._one(members)
                if found is not None and self._pays([found[1]], [rows, self._node(other)]):
                    return self._replace(dict.fromkeys(members), dict([found]))
        return False

    def _joined_with_rows(self, at: int) -> bool:
        """Join work on the same rows, that goes on with these or takes what they take, if that pays; whether any did."""
        rows = self._node(at)
        values = (*rows.inputs, *rows.results)
        beside = {i for v in values for i in self.readers.get(v, ()) if i > at and is_rows(self.nodes[i])}
        for other in sorted(i for i in beside if _are_alike(rows, self._node(i))):
            found = self._one([at, other])
            if found is not None and self._pays([found[1]], [rows, self._node(other)]):
                return self._replace(dict.fromkeys((at, other)), dict([found]))
        return False

    def _node(self, at: int) -> Node:
        node = self.nodes[at]
        assert node is not None, "what has joined another kernel makes and reads nothing any more"
        return node

    def _one(self, members: Sequence[int], again: _Again | None = None) -> tuple[int, Node] | None:
        """Kernels as one, with the results that others read, and in the place of which it is; None if that is no kernel, or has no place.

        With `again`, it computes a value that it would read.
        """
        members, inside = sorted(members), set(members)
        results = [v for at in members for v in self._node(at).results]
        read = {v for at in members for v in self._node(at).inputs}.difference(results)
        read = read if again is None else read.difference([again.value]).union(again.leaves.values())
        after = max((self.made_at.get(v, -1) for v in read), default=-1)
        before = min((i for v in results for i in self.readers.get(v, ()) if i not in inside), default=len(self.nodes))
        place = max((at for at in members if after < at < before), default=-1)
        if place < 0:
            return None
        builder = RegionBuilder()
        made = {} if again is None else again.computed(builder)
        for at in members:
            made |= dict(zip(self._node(at).results, builder.inline_region(self._node(at), made), strict=True))
        stored = [v for v in results if v in self.outputs or not inside.issuperset(self.readers.get(v, ()))]
        like = next((node for at in members if is_rows(node := self._node(at))), self._node(members[-1]))
        like = replace(like, attrs=MappingProxyType({**like.attrs, "kind": Kind.ROWS}))
        one = builder.fused(like, [made[v] for v in stored], stored)
        return (place, one) if _is_possible(one, self.chip) and self._fits(one) else None

    def _fits(self, node: Node) -> bool:
        """Whether its template finds tiles for a kernel over rows; of those alike, one is asked."""
        form = structural_key(node)
        if form not in self.fitting:
            site = Site(node, Region.of(node, range(len(node.inputs) + len(node.results))), self.chip, node.scope)
            try:
                self.fitting[form] = bool(emit_rows(site))
            except CompileError:
                self.fitting[form] = False
        return self.fitting[form]

    # --- what is made again rather than stored for somebody else --------------------------------------------------------

    def _made_again(self, at: int) -> bool:
        """Let later work on rows make rows again, product and all, that the kernel at a position stores for it, if that pays."""
        rows = self._node(at)
        for value, readers in self._rows_for_readers(rows):
            again = _Again.of(rows, value)
            later = {i: None for v in (value, *rows.results) for i in self.readers.get(v, ()) if is_rows(self.nodes[i])}
            for host in later:
                if row_shape(self._node(host)) == value.shape and self._makes(again, at, host, [i for i in readers if i != host]):
                    return True
        return False

    def _rows_for_readers(self, rows: Node) -> Iterator[tuple[Value, Sequence[int]]]:
        """The rows that a kernel makes with products and stores for other kernels only, with the places of these."""
        for value in rows.results if _has_products(rows) else ():
            readers = self.readers.get(value, [])
            if value.shape == row_shape(rows) and value not in self.outputs and readers:
                yield value, readers

    def _makes(self, again: _Again, at: int, host: int, others: Sequence[int]) -> bool:
        """Whether it pays that a kernel over rows makes a value, and takes in the products that read it."""
        if not all(_takes_rows(self._node(i), again.value) for i in others):
            return False
        return self._made_by([host, *others], again, at)

    def _made_by(self, members: Sequence[int], again: _Again, at: int) -> bool:
        """Whether it pays that kernels as one make what the kernel at a position would store for them; if so, they do."""
        found = self._one(members, again)
        still_reduces = any(n.op == "reduce" for n in again.maker.regions[0].nodes)
        if found is None or not still_reduces:
            return False
        if not self._pays([found[1], again.maker], [self._node(i) for i in (at, *members)], again.value):
            return False
        return self._replace(dict.fromkeys(members), {at: again.maker}, dict([found]))

    def _summed_apart(self, at: int) -> bool:
        """Let products that sum over rows make these again, a few columns at a time, where there is no room to sum over whole rows."""
        rows = self._node(at)
        for value, readers in self._rows_for_readers(rows):
            if all(_takes_rows(self._node(i), value, over=True) for i in readers) and self._made_by(readers, _Again.of(rows, value), at):
                return True
        return False

    def _pays(self, new: Sequence[Node], old: Sequence[Node], freed: Value | None = None) -> bool:
        """Whether kernels take less time than others; to hold a value no longer is worth moving it `HELD_MOVES` times."""
        spent, saved = (sum(kernel_seconds(n, self.chip) for n in nodes) for nodes in (new, old))
        return spent < saved + (0.0 if freed is None else held_seconds(bytes_of(freed.type), self.chip))


@dataclass(frozen=True, slots=True)
class _Again:
    """How to make rows again of what a kernel makes them of: `leaves` maps values of its region to those of the graph.

    `maker`: the kernel without the value as a result, but with what is left of each row that it takes to make it.
    """

    value: Value
    nodes: tuple[Node, ...]
    own: Value
    leaves: Mapping[Value, Value]
    maker: Node

    @classmethod
    def of(cls, rows: Node, value: Value) -> _Again:
        """Reductions are not made again: their results are stored."""
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
        maker = builder.fused(rows, [env[o] for o in stored], list(stored.values()))
        return cls(value, tuple(reversed(nodes)), own, {o: v for o, v in outer.items() if o in want} | leaves, maker)

    def computed(self, builder: RegionBuilder) -> dict[Value, Value]:
        """The value in a region."""
        env = {o: builder.operand(v) for o, v in self.leaves.items()}
        builder.inline(self.nodes, env)
        return {self.value: env[self.own]}


def is_rows(node: Node | None) -> bool:
    """Whether a node is a kernel over rows."""
    return node is not None and is_kernel(node, Kind.ROWS)


def _are_alike(one: Node, other: Node) -> bool:
    """Whether two kernels over rows work on the same ones, beside products."""
    mine, others = rows_in(one), rows_in(other)
    return (mine.shape, mine.axes) == (others.shape, others.axes) and _has_products(one) and _has_products(other)


def _has_products(node: Node) -> bool:
    return any(n.op in PRODUCTS for n in node.regions[0].nodes)


def row_shape(rows: Node) -> tuple[int, ...]:
    """The shape of the rows of a kernel."""
    return rows_in(rows).shape


def _belongs(other: Node, rows: Node, *, before: bool) -> bool:
    """Whether a product makes rows (`before`), or takes rows: each whole, or all numbers at one place of them."""
    if not is_kernel(other, Kind.DOT):
        return False
    if not before:
        return any(_takes_rows(other, v) for v in rows.results if v.shape == row_shape(rows))
    (work,), dot = rows.regions, _plain_product(other)
    made = {o for o, v in zip(work.inputs, rows.inputs, strict=True) if v in other.results}
    whole = all(_takes_whole(n) for n in work.nodes if not made.isdisjoint(n.inputs))
    return dot is not None and dot.result.shape == row_shape(rows) and whole and _along(rows)


def _along(rows: Node) -> bool:
    """Whether rows lie along one axis."""
    return all(len(n.attrs["axes"]) == 1 for n in rows.regions[0].nodes if n.op == "reduce")


def _takes_rows(product: Node, value: Value, *, over: bool = False) -> bool:
    """Whether a product takes rows as they are, and sums along each, or `over` them; then all other axes of theirs are batches."""
    dot = _plain_product(product)
    if dot is None:
        return False
    (region,) = product.regions
    whole, own = contraction_of(dot), {o for o, v in zip(region.inputs, product.inputs, strict=True) if v is value}
    taken = [labels for v, labels in zip(dot.inputs, (whole.lhs, whole.rhs), strict=True) if v in own]
    only = all(n is dot for n in region.nodes if not own.isdisjoint(n.inputs))
    return only and len(taken) == 1 and (_is_over(taken[0], whole) or (not over and whole.contracted == taken[0][-1:]))


def _plain_product(node: Node) -> Node | None:
    """The product of a kernel that rows may join: a dot with more than one row, column and term, and no sums of its results."""
    (region,) = node.regions if is_kernel(node, Kind.DOT) else (None,)
    dot = next((n for n in region.nodes if n.op == "dot"), None) if region is not None else None
    if region is None or dot is None or any(n.op == "reduce" for n in region.nodes) or not _is_of_neighbours(dot):
        return None
    whole, sizes = contraction_of(dot), sizes_of(dot)
    sides = [math.prod(sizes[x] for x in labels) for labels in whole.roles[1:]]
    return dot if 1 not in sides and 0 not in sizes.values() else None


def _is_over(rows: Labels, whole: Contraction) -> bool:
    """Whether a product sums over rows, of which all other axes are batches."""
    return len(whole.contracted) == 1 and {*rows[:-1]} == {*whole.batch, *whole.contracted}


def _is_of_neighbours(dot: Node) -> bool:
    """Whether the blocks of a product's sum are neighbours along one axis, or all there is."""
    sizes = sizes_of(dot)
    block = depth_block(contraction_of(dot), sizes)
    return len(block) == 1 or all(n == sizes[x] for x, n in block.items())


def _takes_whole(node: Node) -> bool:
    return node.op in ELEMENTWISE or node.op in ("reduce", *PRODUCTS)


def _is_possible(node: Node, chip: Chip) -> bool:
    """Whether a kernel makes only rows, what is left of them, and what products make of them, and tiles of it all find room on the chip."""
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
