"""Fuse: fuse elementwise operations with the kernels that produce their operands, with reductions, and with products as epilogues."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tpuflow.lower.graph.graph import Graph
from tpuflow.lower.passes.base import ChipPass
from tpuflow.lower.passes.grouping import Grouping
from tpuflow.lower.passes.outline import Outline


@dataclass(frozen=True, slots=True)
class Fuse(ChipPass):
    """Collapse elementwise DAGs, reductions with what surrounds them, and products with their epilogues, into `fused` nodes.

    Before: %2 = dot %x, %w; %3 = broadcast %b; %4 = add %2, %3; %5 = max %4, %0.    After: %5 = fused{dot; broadcast; add; max} %x, %w, %b.
    Needs: simplified graph.    Keeps: every operation and every rounding, so every bit; effects and their order.
    Never: makes a cycle, moves work across a loop or branch, or fuses two products.
    """

    def __call__(self, graph: Graph) -> Graph:
        inner = replace(graph, nodes=tuple(self.map_regions(node) for node in graph.nodes))
        grouping = Grouping(inner)
        return replace(inner, nodes=tuple(Outline(grouping, self.chip).build()), outputs=grouping.outputs)
