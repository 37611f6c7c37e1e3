"""SumInProduct: a product's kernel also computes the sums of its results over all rows (column sums)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tpuflow.lower.graph.blocking import is_one_step
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.ops import ELEMENTWISE, PRODUCTS
from tpuflow.lower.graph.products import contraction_of, sizes_of
from tpuflow.lower.passes.analysis import depending
from tpuflow.lower.passes.base import Pass
from tpuflow.lower.passes.region_builder import fits_on_chip
from tpuflow.lower.passes.sums import part, with_sums


@dataclass(frozen=True, slots=True)
class SumInProduct(Pass):
    """Let a product's kernel also sum its results over all rows, per column, so that no other kernel has to read them for that.

    Before: %2 = fused{dot; convert} %x, %w; %3, %4 = fused{convert; mul; reduce; reduce} %2.
    After:  %2, %3, %4 = fused{dot; convert; convert; mul; reduce; reduce} %x, %w.
    Needs: fused graph.    Keeps: every operation and every rounding; sums are made tile by tile, as ever.
    Never: where no instruction can do all of the product's own sum.
    """

    def __call__(self, graph: Graph) -> Graph:
        return replace(graph, nodes=with_sums([self.map_regions(node) for node in graph.nodes], Kind.DOT, Kind.DOT, _takes_in))


def _takes_in(product: Node, reduction: Node) -> bool:
    """Whether the product's kernel can do the reduction: of its results elementwise, over all axes but its columns, and with the product's
    contraction in one step.

    Batch axes must precede the rows, as they do in the grid, so that the sums run in the order of the result's axes.
    """
    (region,), (inner,) = product.regions, reduction.regions
    dot = next(n for n in region.nodes if n.op in PRODUCTS)
    first = next(n for n in inner.nodes if n.op == "reduce")
    whole, sizes = contraction_of(dot), sizes_of(dot)
    columns = tuple(axis for axis, x in enumerate(whole.out) if x in whole.columns)
    rows = [x for x in whole.out if x not in whole.columns]
    kept = tuple(axis for axis in range(len(dot.result.shape)) if axis not in first.attrs["axes"])
    return (
        first.inputs[0].shape == dot.result.shape
        and kept == columns
        and rows == sorted(rows, key=lambda x: x not in whole.rhs)
        and 0 < math.prod(sizes[x] for x in whole.contracted)
        and is_one_step(whole, sizes)
        and fits_on_chip(v.type for v in {**dict.fromkeys(product.inputs), **dict.fromkeys(reduction.inputs)})
        and all(_enters_whole(inner, own) for own, v in zip(inner.inputs, reduction.inputs, strict=True) if v in product.results)
    )


def _enters_whole(region: Graph, value: Value) -> bool:
    """Whether a region uses an input element by element only."""
    return all(n.op in ELEMENTWISE or n.op == "reduce" for n in region.nodes if value in n.inputs)


def split_sums(node: Node) -> tuple[Node, Node]:
    """The inverse of this pass, for a kernel that does not fit on the chip: (the product's kernel, the kernel that reduces its results)."""
    (region,) = node.regions
    after = depending(region.nodes, [n.result for n in region.nodes if n.op == "reduce"])
    outer = dict(zip(region.outputs, node.results, strict=True))
    made, sums = [v for v in region.outputs if v not in after], [v for v in region.outputs if v in after]
    operands = dict(zip(region.inputs, node.inputs, strict=True))
    product = part(node, Kind.DOT, region.nodes, operands, {v: outer[v] for v in made})
    rest = [n for n in region.nodes if not set(made).intersection(n.results)]
    reduction = part(node, Kind.REDUCE, rest, operands | {v: outer[v] for v in made}, {v: outer[v] for v in sums})
    return product, reduction
