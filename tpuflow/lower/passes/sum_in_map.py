"""SumInMap: a map's kernel also computes the sums, or other reductions, of its results."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from tpuflow.chips import Chip
from tpuflow.chips.chip import LANE_BYTES
from tpuflow.lower.graph.graph import Graph, Node, TensorType
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.passes.base import ChipPass
from tpuflow.lower.passes.kernel_cost import MAX_NODES, uses_elementwise
from tpuflow.lower.passes.region_builder import fits_on_chip
from tpuflow.lower.passes.sums import with_sums

LEAST_FILLED = 0.25
"""Of a vector register, where it holds the rows of an array one by one: with less, a map, which takes rows together, is better left alone.
With an eighth both in one kernel take 7 % longer on tpu-v5e, with a sixteenth 23 %; with a quarter they save a tenth on every TPU."""


@dataclass(frozen=True, slots=True)
class SumInMap(ChipPass):
    """Let the kernel of a map also reduce its results, so that no other kernel has to read them for that.

    Before: %2 = fused{select} %p, %dy; %3, %4 = fused{reduce; mul; reduce} %2, %x.
    After:  %2, %3, %4 = fused{select; reduce; mul; reduce} %p, %dy, %x.
    Needs: fused graph.    Keeps: every operation and every rounding; sums are made tile by tile, as ever.
    Never: lets a map wait, takes so many arrays that tiles get small, or where rows are so short that lanes stay empty.
    """

    def __call__(self, graph: Graph) -> Graph:
        takes_in = functools.partial(_takes_in, self.chip)
        return replace(graph, nodes=with_sums([self.map_regions(node) for node in graph.nodes], Kind.MAP, Kind.REDUCE, takes_in))


def _takes_in(chip: Chip, maker: Node, reduction: Node) -> bool:
    """Whether one kernel can do both: the reduction is over the map's space, and reads its results element by element."""
    (region,), (inner,) = maker.regions, reduction.regions
    first = next(n for n in inner.nodes if n.op == "reduce")
    return (
        all(v.shape == first.inputs[0].shape for v in region.outputs)
        and _filled(first.inputs[0].type, chip) >= LEAST_FILLED
        and not any(n.op == "join" for n in region.nodes)
        and len(region.nodes) + len(inner.nodes) <= MAX_NODES
        and fits_on_chip(v.type for v in dict.fromkeys((*maker.inputs, *maker.results, *reduction.inputs, *reduction.results)))
        and all(uses_elementwise(reduction, v) for v in reduction.inputs if v in maker.results)
    )


def _filled(type: TensorType, chip: Chip) -> float:
    """How much of vector registers the rows of an array fill."""
    return chip.vector_cycles((type.elems,), LANE_BYTES) / max(chip.vector_cycles(type.shape, LANE_BYTES), 1)
