"""SumInProduct: a product's kernel also computes the sums of its results over all rows (column sums)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from tpuflow.lower.graph.blocking import is_one_step
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.ops import ELEMENTWISE, PRODUCTS
from tpuflow.lower.graph.products import contraction_of, sizes_of
from tpuflow.lower.passes.analysis import depending
from tpuflow.lower.passes.base import Pass
from tpuflow.lower.passes.region_builder import RegionBuilder, fits_on_chip, is_kernel


@dataclass(frozen=True, slots=True)
class SumInProduct(Pass):
    """Let a product's kernel also sum its results over all rows, per column, so that no other kernel has to read them for that.

    Before: %2 = fused{dot; convert} %x, %w; %3, %4 = fused{convert; mul; reduce; reduce} %2.
    After:  %2, %3, %4 = fused{dot; convert; convert; mul; reduce; reduce} %x, %w.
    Needs: fused graph.    Keeps: every operation and every rounding; sums are made tile by tile, as ever.
    Never: where no instruction can do all of the product's own sum.
    """

    def __call__(self, graph: Graph) -> Graph:
        nodes: list[Node | None] = [self.map_regions(node) for node in graph.nodes]
        made = {v: i for i, node in enumerate(nodes) if node is not None for v in node.results}
        for at, reduction in enumerate(nodes):
            if reduction is None or not is_kernel(reduction, Kind.REDUCE):
                continue
            last = max((made.get(v, -1) for v in reduction.inputs), default=-1)
            product = nodes[last] if last >= 0 else None
            if product is not None and is_kernel(product, Kind.DOT) and _takes_in(product, reduction):
                nodes[last], nodes[at] = _joined(product, reduction), None
                made.update(dict.fromkeys(reduction.results, last))
        return replace(graph, nodes=tuple(node for node in nodes if node is not None))


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


def _joined(product: Node, reduction: Node) -> Node:
    """One kernel with the results of both."""
    builder = RegionBuilder()
    made = builder.inline_region(product)
    sums = builder.inline_region(reduction, dict(zip(product.results, made, strict=True)))
    return builder.fused(product, [*made, *sums], [*product.results, *reduction.results])


def split_sums(node: Node) -> tuple[Node, Node]:
    """The inverse of this pass, for a kernel that does not fit on the chip: (the product's kernel, the kernel that reduces its results)."""
    (region,) = node.regions
    after = depending(region.nodes, [n.result for n in region.nodes if n.op == "reduce"])
    outer = dict(zip(region.outputs, node.results, strict=True))
    made, sums = [v for v in region.outputs if v not in after], [v for v in region.outputs if v in after]
    operands = dict(zip(region.inputs, node.inputs, strict=True))
    product = _part(node, Kind.DOT, region.nodes, operands, {v: outer[v] for v in made})
    rest = [n for n in region.nodes if not set(made).intersection(n.results)]
    reduction = _part(node, Kind.REDUCE, rest, operands | {v: outer[v] for v in made}, {v: outer[v] for v in sums})
    return product, reduction


def _part(node: Node, kind: Kind, nodes: Iterable[Node], operands: Mapping[Value, Value], results: Mapping[Value, Value]) -> Node:
    """A fused node of some of a region's nodes; `operands` and `results` map values of the region to values of the graph."""
    builder = RegionBuilder()
    env = {own: builder.operand(value) for own, value in operands.items()}
    builder.inline(nodes, env)
    like = replace(node, attrs=MappingProxyType({**node.attrs, "kind": kind}))
    return builder.fused(like, [env[own] for own in results], list(results.values()))
