"""FuseRows: fuse kernels that reduce rows with those that use the rows and their reductions, while the rows are on the chip."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from types import MappingProxyType

from tpuflow.chips import Chip
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.ops import ELEMENTWISE
from tpuflow.lower.passes.base import ChipPass
from tpuflow.lower.passes.kernel_cost import MAX_NODES, row_bytes
from tpuflow.lower.passes.region_builder import RegionBuilder, fits_on_chip, is_kernel


@dataclass(frozen=True, slots=True)
class FuseRows(ChipPass):
    """Fuse reductions of rows with the elementwise work on rows and on the reductions: softmax, layer normalisation, their gradients.

    Before: %1 = fused{reduce max} %0; %2 = fused{sub; exp} %0, %1; %3 = fused{reduce add} %2; %4 = fused{div} %2, %3.
    After:  %4 = fused{reduce max; sub; exp; reduce add; div} %0.
    Needs: fused graph.    Keeps: every operation and every rounding.
    Never: where the chip's memory is too small for a row of everything that is made.
    """

    def __call__(self, graph: Graph) -> Graph:
        nodes: list[Node | None] = [self.map_regions(node) for node in graph.nodes]
        made = {v: i for i, node in enumerate(nodes) if node is not None for v in node.results}
        readers = Counter(v for node in nodes if node is not None for v in set(node.inputs)) + Counter(dict.fromkeys(graph.outputs, 1))
        for at, node in enumerate(nodes):
            last = max((made.get(v, -1) for v in node.inputs), default=-1) if node is not None else -1
            maker = nodes[last] if last >= 0 else None
            if node is None or maker is None or not _go_together(maker, node, self.chip):
                continue
            nodes[last], nodes[at] = _joined(maker, node, readers), None
            made.update(dict.fromkeys(node.results, last))
        return replace(graph, nodes=tuple(node for node in nodes if node is not None))


def _go_together(maker: Node, node: Node, chip: Chip) -> bool:
    """Whether a kernel can be fused with the row kernel that defines its last operand."""
    if not (is_kernel(maker, Kind.REDUCE, Kind.ROWS) and is_kernel(node, Kind.MAP, Kind.REDUCE)):
        return False
    first = next(n for n in maker.regions[0].nodes if n.op == "reduce")
    shape, axes = first.inputs[0].shape, first.attrs["axes"]
    rows = math.prod(shape[a] for a in axes)
    values = {**dict.fromkeys((*maker.inputs, *maker.results)), **dict.fromkeys((*node.inputs, *node.results))}
    return (
        axes == tuple(range(len(shape) - len(axes), len(shape)))
        and rows > 1
        and len(axes) < len(shape)
        and len(maker.regions[0].nodes) + len(node.regions[0].nodes) <= MAX_NODES
        and fits_on_chip(v.type for v in values)
        and row_bytes((maker, node), chip) <= chip.vmem_bytes
        and _is_of_rows(node, maker, shape, axes)
    )


def _is_of_rows(node: Node, maker: Node, shape: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Whether a kernel works on rows of that shape, and reads the other's results elementwise or as per-row values."""
    (region,) = node.regions
    reductions = [n for n in region.nodes if n.op == "reduce"]
    if any(n.op == "join" for n in region.nodes) or any(n.inputs[0].shape != shape or n.attrs["axes"] != axes for n in reductions):
        return False
    if not reductions and any(v.shape != shape for v in region.outputs):
        return False
    taken = {own: v for own, v in zip(region.inputs, node.inputs, strict=True) if v in maker.results}
    return bool(taken) and all(_fits_in(n, v, len(shape) - len(axes)) for n in region.nodes for v in n.inputs if v in taken)


def _fits_in(user: Node, value: Value, kept: int) -> bool:
    """Whether a node can read a value that is on the chip: elementwise, in a reduction, or as a per-row value broadcast along its row."""
    if user.op == "broadcast":
        return len(value.shape) == kept and user.attrs["axes"] == tuple(range(kept)) and user.result.shape[:kept] == value.shape
    return user.op in ELEMENTWISE or user.op == "reduce"


def _joined(maker: Node, node: Node, readers: Counter[Value]) -> Node:
    """The fused kernel, with those results of both that have other readers."""
    builder = RegionBuilder()
    made = dict(zip(maker.results, builder.inline_region(maker), strict=True))
    made |= dict(zip(node.results, builder.inline_region(node, made), strict=True))
    readers.subtract(v for v in set(node.inputs) if v in maker.results)
    stored = {v: own for v, own in made.items() if readers[v] > 0}
    like = replace(node, attrs=MappingProxyType({**node.attrs, "kind": Kind.ROWS}))
    return builder.fused(like, list(stored.values()), list(stored))
