"""What a second of the memory bus is worth that a kernel leaves to copies: by this products weigh what they move beside their time.

Copies bring arrays to the chip while kernels run that work longer than they move (`stays`); those that move longer than they work gain by
it. Where less is wanted than there is, a part of what is left over is worth nothing; in a program of one kernel all of it is. It is an
estimate of a shadow price, by the closed forms that passes compare by, before any kernel is cut.
"""

from __future__ import annotations

from collections.abc import Iterator

from tpuflow.chips import Chip
from tpuflow.lower.graph.graph import Graph, Node
from tpuflow.lower.passes.kernel_cost import memory_and_compute_seconds
from tpuflow.lower.passes.region_builder import bytes_of
from tpuflow.lower.passes.unit_seconds import move_seconds
from tpuflow.lower.tiling import LONGER, MATRIX_EDGE


def bus_price(graph: Graph, chip: Chip) -> float:
    """Seconds of the bus that a graph's kernels want for each that they leave, at most 1; 0 where arrays stay nowhere. Loops count once."""
    if not chip.array_space:
        return 0.0
    wanted = left = 0.0
    for node in _kernels(graph):
        move, work = memory_and_compute_seconds(node, chip, LONGER * MATRIX_EDGE)  # tiles that move as little as any
        wanted += max(0.0, min(move - work, _placed_seconds(node, chip)))
        left += max(0.0, work - move)
    return min(1.0, wanted / left) if left else 0.0


def _kernels(graph: Graph) -> Iterator[Node]:
    """The fused nodes of a graph and of what is nested in it."""
    for node in graph.nodes:
        if node.op == "fused":
            yield node
        else:
            for region in node.regions:
                yield from _kernels(region)


def _placed_seconds(node: Node, chip: Chip) -> float:
    """The moves of those operands of a kernel for which there is room on the chip."""
    return move_seconds(sum(n for n in map(bytes_of, (v.type for v in node.inputs)) if n <= chip.resident_bytes), chip)
