"""Simplify: dead code elimination, common subexpression elimination, constant folding and peephole rules."""

from __future__ import annotations

from dataclasses import dataclass

from tpuflow.lower.graph.graph import Graph
from tpuflow.lower.passes.base import Pass
from tpuflow.lower.passes.rewriter import Rewriter
from tpuflow.lower.passes.rules import RULES


@dataclass(frozen=True, slots=True)
class Simplify(Pass):
    """Dead nodes, common subexpressions, and the local rules of `passes/rules`, regions included.

    Before: %1 = transpose %0; %2 = reshape %1; %3 = dot %2, %x.    After: %3 = dot %0, %x with other dimension numbers.
    Needs: nothing.    Keeps: every output's type and bits, effects and their order.
    Never: algebra that rounds differently: no x * 1.1 * 1.3 -> x * 1.43, no x / 3 -> x * (1 / 3), no x + 0 -> x on floats.
    """

    def __call__(self, graph: Graph) -> Graph:
        inner = tuple(self.map_regions(node) for node in graph.nodes)
        return Rewriter(RULES).rebuild(Graph(graph.name, graph.inputs, inner, graph.outputs, graph.input_names, graph.output_names))
