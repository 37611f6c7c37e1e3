"""The parts of a kernel over rows: work on whole rows, work on per-row values, and products that make or consume rows.

A per-row value has the rows' shape without the reduced axes: the maximum of a row, say. A product makes rows (queries @ keys), or consumes
them: along each (weights @ values), or summed over all (gradients). Every axis of every value carries a label; those of the rows are 0, 1,
..., and the reduced ones come last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tpuflow.lower.emit.region import LEVEL_STEPS, Region, Roots
from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.graph.ops import PRODUCTS
from tpuflow.lower.graph.products import contraction_of
from tpuflow.lower.graph.rows import Rows, rows_of
from tpuflow.lower.passes.analysis import depending


@dataclass(frozen=True, slots=True)
class Product:
    """A product of a rows region: the labels of its operands and its result.

    `work`, for its operands and its result that are not rows: the nodes that compute the operand from inputs, or outputs from the result.
    """

    node: Node
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    out: tuple[int, ...]
    makes_rows: bool
    work: Mapping[Value, Region]

    @property
    def contracted(self) -> tuple[int, ...]:
        """The labels that are summed over."""
        return tuple(x for x in self.lhs if x in self.rhs and x not in self.out)

    @property
    def sides(self) -> tuple[tuple[Value, tuple[int, ...]], ...]:
        """Operands and result, each with its labels."""
        lhs, rhs = self.node.inputs
        return (lhs, self.lhs), (rhs, self.rhs), (self.node.result, self.out)

    @property
    def levels(self) -> list[Roots]:
        """The levels of the operands and of the result that are not rows."""
        labels = dict(self.sides)
        found = ((region.results or (value,), labels[value]) for value, region in self.work.items())
        return [(roots, own) for roots, own in found]


@dataclass(frozen=True, slots=True)
class Spaces:
    """A rows region by parts: work on `rows`, work on `per_row` values, products. `kept` and `reduced` are the labels of the rows' axes,
    `sizes` the length of every label.
    """

    rows: Region
    per_row: Region
    products: tuple[Product, ...]
    kept: tuple[int, ...]
    reduced: tuple[int, ...]
    sizes: Mapping[int, int]

    @classmethod
    def of(cls, region: Region) -> Spaces:
        """Divide a region's nodes by what their results are used for."""
        found = rows_of(region.nodes)
        mixed = depending(region.nodes, [p.result for p in found.consumers])
        taken = [v for p in found.consumers for v in p.inputs if v in found.values]
        others = [entry for entry in region.outputs if entry[0] not in mixed]
        of_rows, of_per_row = (tuple(e for e in others if (e[0].shape == found.shape) == whole) for whole in (True, False))
        repeated = [n.inputs[0] for n in region.nodes if repeats(n, region.inputs)]
        row_work = _part(region, [*(n.inputs[0] for n in region.find("reduce")), *taken, *(v for v, _ in of_rows)], of_rows)
        per_row_work = _part(region, [*repeated, *(v for v, _ in of_per_row)], of_per_row)
        sizes = dict(enumerate(found.shape))
        products = _labelled(region, found, sizes)
        kept = tuple(a for a in range(len(found.shape)) if a not in found.axes)
        return cls(row_work, per_row_work, products, kept, found.axes, sizes)

    @property
    def shared(self) -> frozenset[int]:
        """The labels that all operands and results of all products have: batches."""
        sides = [set(labels) for p in self.products for _, labels in p.sides]
        return frozenset(self.kept).intersection(*sides)

    @property
    def in_turn(self) -> tuple[int, ...]:
        """The labels whose tiles are sequential in a kernel with products: the kept ones that are no batches; without reductions, of these
        only the ones that a product contracts.
        """
        summed = {x for p in self.products for x in p.contracted}
        free = [x for x in self.kept if x not in self.shared and (self.reduced or x in summed)]
        return tuple(free) if self.products else ()

    @property
    def levels(self) -> list[Roots]:
        """The levels of products, rows and per-row values, in this order. All results are roots, since work alternates between levels."""
        whole = (*self.kept, *self.reduced)
        made = dict.fromkeys((*(v for n in self.rows.nodes for v in n.results), *self.rows.results))
        per_row = dict.fromkeys((*(v for n in self.per_row.nodes for v in n.results), *self.per_row.results))
        return [*(level for p in self.products for level in p.levels), (tuple(made), whole), (tuple(per_row), self.kept)]


def repeats(node: Node, inputs: Iterable[Value]) -> bool:
    """Whether a node of a rows region broadcasts a per-row value along the row."""
    return node.op == "broadcast" and node.inputs[0] not in inputs


def _part(region: Region, roots: Iterable[Value], outputs: tuple[tuple[Value, int], ...] = ()) -> Region:
    """The nodes that compute values at their own level: up to reductions, products and broadcasts of per-row values."""
    want, found = set(roots), []
    for node in reversed(region.nodes):
        if node.op not in LEVEL_STEPS and not repeats(node, region.inputs) and not want.isdisjoint(node.results):
            found.append(node)
            want.update(node.inputs)
    return Region(tuple(reversed(found)), region.inputs, outputs)


def _labelled(region: Region, found: Rows, sizes: dict[int, int]) -> tuple[Product, ...]:
    """The products with labelled axes; adds to `sizes` the length of every new label. An operand of two products has the same labels in
    both, apart from those of the rows.
    """
    rank, known = len(sizes), dict[Value, tuple[int, ...]]()
    products = []
    for node in (n for n in region.nodes if n.op in PRODUCTS):
        whole, mixes = contraction_of(node), node in found.consumers
        sides = tuple(zip((*node.inputs, node.result), (whole.lhs, whole.rhs, whole.out), strict=True))
        rows = [v for v in node.inputs if v in found.values] if mixes else [node.result]
        label = dict(pair for v, own in sides if v in rows for pair in zip(own, range(rank), strict=True))
        for value, own in sides:
            for x, other in zip(own, known.get(value, ()), strict=False):
                if other >= rank and other not in label.values():
                    label.setdefault(x, other)
        for value, own in sides:
            for x, n in zip(own, value.shape, strict=True):
                sizes[label.setdefault(x, len(sizes))] = n
        lhs, rhs, out = (tuple(label[x] for x in own) for _, own in sides)
        known.update(zip((*node.inputs, node.result), (lhs, rhs, out), strict=True))
        work = {v: _part(region, [v]) for v in node.inputs if v not in rows}
        if mixes:
            after = depending(region.nodes, node.results)
            outputs = tuple(entry for entry in region.outputs if entry[0] in after)
            work[node.result] = _part(region, [v for v, _ in outputs], outputs)
        products.append(Product(node, lhs, rhs, out, not mixes, work))
    return tuple(products)
