"""The shadow prices of memory bandwidth and of room on the chip: what one kernel leaves of them is worth to others.

Products choose their tiles by it (`tiling.matmul_tiles`).

Compute-bound kernels leave bus time in which arrays are copied to the chip (`stays`), from where memory-bound kernels then read them. Where
less time is wanted than is left, a part of it is worth nothing, so that the price is low, though never below `LEAST_BUS`. It is estimated
before any kernel is tiled, from the closed forms of `kernel_cost`.
"""

from __future__ import annotations

from collections.abc import Iterator

from tpuflow.chips import Chip
from tpuflow.lower.graph.graph import Graph, Node
from tpuflow.lower.passes.kernel_cost import memory_and_compute_seconds
from tpuflow.lower.passes.region_builder import bytes_of
from tpuflow.lower.passes.unit_seconds import move_seconds
from tpuflow.lower.tiling import LONGER, MATRIX_EDGE, Prices

LEAST_BUS = 0.2
"""The least price of the bus where arrays can be resident, even if no kernel wants more of it: of tilings that take about the same time,
that which moves least. Tried on the step of VGG-16 at batch 32 on tpu-v3, modelled: 0 gives 17.3 GB in 41.23 ms, 0.1 15.3 in 41.22, 0.2 and
0.5 14.8 in 41.21."""


def prices(graph: Graph, chip: Chip) -> Prices:
    """The prices for products of a program; 0 on chips without resident arrays. A loop counts as one trip.

    Of the bus: seconds of bus time that memory-bound kernels could save by resident arrays, per second that compute-bound kernels leave
    idle. Of room: those seconds as a share of all that memory-bound kernels wait for the bus; it is small where most arrays are too large.
    """
    if not chip.array_space:
        return Prices(0.0, 0.0)
    wanted = waited = left = 0.0
    for node in _kernels(graph):
        move, work = memory_and_compute_seconds(node, chip, LONGER * MATRIX_EDGE)  # tiles that move as little as any
        wanted += max(0.0, min(move - work, _placed_seconds(node, chip)))
        waited += max(0.0, move - work)
        left += max(0.0, work - move)
    return Prices(max(LEAST_BUS, min(1.0, wanted / left)) if left else LEAST_BUS, wanted / waited if waited else 0.0)


def _kernels(graph: Graph) -> Iterator[Node]:
    """The fused nodes of a graph and of its nested regions."""
    for node in graph.nodes:
        if node.op == "fused":
            yield node
        else:
            for region in node.regions:
                yield from _kernels(region)


def _placed_seconds(node: Node, chip: Chip) -> float:
    """Seconds to move those operands of a kernel that are small enough to be resident on the chip."""
    return move_seconds(sum(n for n in map(bytes_of, (v.type for v in node.inputs)) if n <= chip.resident_bytes), chip)
