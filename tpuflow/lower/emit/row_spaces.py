"""What a kernel over rows consists of: work on rows, on what is left of them, and on the operands and results of products beside them.

A product of the first kind makes rows (queries with keys), one of the second mixes something by rows (weights with values) or sums over
all rows (gradients). Every axis of everything carries a label: those of the rows are 0, 1, ..., the last of which is the row itself.
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

    `work`: what makes an operand that is no rows of loads, and what is made of a result that is no rows.
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
        """The operands and results that are no rows."""
        labels = dict(self.sides)
        found = ((region.results or (value,), labels[value]) for value, region in self.work.items())
        return [(roots, own) for roots, own in found]


@dataclass(frozen=True, slots=True)
class Spaces:
    """The work on rows, on what is left of them, and the products; `kept` and `reduced` are the labels of the rows' axes."""

    rows: Region
    left: Region
    products: tuple[Product, ...]
    kept: tuple[int, ...]
    reduced: tuple[int, ...]
    sizes: Mapping[int, int]

    @classmethod
    def of(cls, region: Region) -> Spaces:
        """Where the nodes of a region belong, by what they are made for."""
        found = rows_of(region.nodes)
        mixed = depending(region.nodes, [p.result for p in found.mixing])
        taken = [v for p in found.mixing for v in p.inputs if v in found.values]
        others = [entry for entry in region.outputs if entry[0] not in mixed]
        of_rows, of_left = (tuple(e for e in others if (e[0].shape == found.shape) == whole) for whole in (True, False))
        repeated = [n.inputs[0] for n in region.nodes if repeats(n, region.inputs)]
        row_work = _part(region, [*(n.inputs[0] for n in region.find("reduce")), *taken, *(v for v, _ in of_rows)], of_rows)
        left_work = _part(region, [*repeated, *(v for v, _ in of_left)], of_left)
        sizes = dict(enumerate(found.shape))
        products = _labelled(region, found, sizes)
        kept = tuple(a for a in range(len(found.shape)) if a not in found.axes)
        return cls(row_work, left_work, products, kept, found.axes, sizes)

    @property
    def shared(self) -> frozenset[int]:
        """The labels that all operands and results of all products have: batches."""
        sides = [set(labels) for p in self.products for _, labels in p.sides]
        return frozenset(self.kept).intersection(*sides)

    @property
    def in_turn(self) -> tuple[int, ...]:
        """The labels whose tiles come in sequence beside products: all kept ones but batches; where nothing is reduced, what is summed."""
        summed = {x for p in self.products for x in p.contracted}
        free = [x for x in self.kept if x not in self.shared and (self.reduced or x in summed)]
        return tuple(free) if self.products else ()

    @property
    def levels(self) -> list[Roots]:
        """What the products take and make beside rows, rows, what is left of them; all that is made is a root, since levels take turns."""
        whole = (*self.kept, *self.reduced)
        made = dict.fromkeys((*(v for n in self.rows.nodes for v in n.results), *self.rows.results))
        left = dict.fromkeys((*(v for n in self.left.nodes for v in n.results), *self.left.results))
        return [*(level for p in self.products for level in p.levels), (tuple(made), whole), (tuple(left), self.kept)]


def repeats(node: Node, inputs: Iterable[Value]) -> bool:
    """Whether a node of a rows region leads from what is left of rows back to them."""
    return node.op == "broadcast" and node.inputs[0] not in inputs


def _part(region: Region, roots: Iterable[Value], outputs: tuple[tuple[Value, int], ...] = ()) -> Region:
    """The nodes that make values at their own level."""
    want, found = set(roots), []
    for node in reversed(region.nodes):
        if node.op not in LEVEL_STEPS and not repeats(node, region.inputs) and not want.isdisjoint(node.results):
            found.append(node)
            want.update(node.inputs)
    return Region(tuple(reversed(found)), region.inputs, outputs)


def _labelled(region: Region, found: Rows, sizes: dict[int, int]) -> tuple[Product, ...]:
    """The products; `sizes` learns the length of every label. Equal operands have equal labels where these are none of the rows'."""
    rank, known = len(sizes), dict[Value, tuple[int, ...]]()
    products = []
    for node in (n for n in region.nodes if n.op in PRODUCTS):
        whole, mixes = contraction_of(node), node in found.mixing
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
