"""How a kernel is shared by the cores of a chip.

Cores take points of the grid, equally many each. A kernel with fewer points than there are cores lends the idle ones to the points:
its steps are shared out too, a helper works out the product or the reduction of a step, and the point's own core adds what it is sent to
the accumulator, in the order of the grid. Values therefore depend on neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tpuflow.chips.chip import Chip
from tpuflow.isa.instruction import Instruction, Tile
from tpuflow.isa.matrix import MatmulAccumulate
from tpuflow.isa.program import Kernel
from tpuflow.isa.vector import ReduceInto


@dataclass(frozen=True, slots=True)
class Share:
    """What the busiest core does: points, and steps of each; cores at work, and those of them that own a point; the price of adding one
    helper's step."""

    cores: int
    owners: int
    points: int
    steps: int
    combine_cycles: int = 0
    combine_bytes: int = 0


def share(kernel: Kernel, chip: Chip) -> Share:
    """The busiest core's share of a kernel."""
    points = math.prod(g.size for g in kernel.grid if g.kind == "parallel")
    steps = math.prod(g.size for g in kernel.grid if g.kind == "sequential")
    helpers = chip.cores // max(points, 1)
    accumulators = tuple(_accumulators(kernel))
    if helpers < 2 or steps < 2 or not _only_accumulates(kernel, accumulators):
        cores = max(1, min(chip.cores, points))
        return Share(cores, cores, -(-points // cores), steps)
    own = -(-steps // helpers)
    cycles = sum(chip.vector_cycles(t.shape, t.dtype.bytes) + math.ceil(chip.issue_cycles) for t in accumulators)
    moved = sum(t.elems * t.dtype.bytes for t in accumulators)  # each helper sends its own while the others do; the owner reads all
    return Share(points * -(-steps // own), points, 1, own, cycles, moved)


def _accumulators(kernel: Kernel) -> Iterator[Tile]:
    """Tiles that the body adds to."""
    seen = set()
    for instruction in kernel.body:
        if isinstance(instruction, MatmulAccumulate | ReduceInto) and instruction.acc not in seen:
            seen.add(instruction.acc)
            yield instruction.acc


def _only_accumulates(kernel: Kernel, accumulators: tuple[Tile, ...]) -> bool:
    """Whether steps touch what other steps wrote only by adding to an accumulator, so that they can be worked out apart."""
    made: set[Tile] = set()
    for instruction in kernel.body:
        adds = isinstance(instruction, MatmulAccumulate | ReduceInto)
        carried = {t for t in instruction.reads() if t not in made and not _is_constant(t, kernel.prologue, kernel.body)}
        if carried - ({instruction.acc} if adds else set()):  # type: ignore[attr-defined]
            return False
        made.update(t for t in instruction.writes() if t not in accumulators)
    return bool(accumulators)


def _is_constant(tile: Tile, prologue: tuple[Instruction, ...], body: tuple[Instruction, ...]) -> bool:
    """Written before the steps and by none of them."""
    return any(tile in set(i.writes()) for i in prologue) and not any(tile in set(i.writes()) for i in body)
