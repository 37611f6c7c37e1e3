"""How a kernel is shared by the cores of a chip.

Cores take points of the grid, equally many each. A kernel with fewer points than there are cores lends the idle ones to the points:
its steps are shared out too, and so is the accumulator: each of the point's cores works out the products or reductions of its steps,
sends every core the piece of them that is that one's, and adds what it is sent to its own piece of the accumulator, in the order of the
grid. At the end the point's own core collects the pieces. Values therefore depend on neither.
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
    """What the busiest core does: points, and steps of each; cores at work; the price of adding its piece of another core's step, and
    the bytes of the accumulators, which a point's own core collects."""

    cores: int
    points: int
    steps: int
    combine_cycles: int = 0
    combine_bytes: int = 0
    collected_bytes: int = 0


def share(kernel: Kernel, chip: Chip) -> Share:
    """The busiest core's share of a kernel."""
    points = math.prod(g.size for g in kernel.grid if g.kind == "parallel")
    steps = math.prod(g.size for g in kernel.grid if g.kind == "sequential")
    helpers = chip.cores // max(points, 1)
    accumulators = tuple(_accumulators(kernel))
    if helpers < 2 or steps < 2 or not _only_accumulates(kernel, accumulators):
        cores = max(1, min(chip.cores, points))
        return Share(cores, -(-points // cores), steps)
    own = -(-steps // helpers)
    team = -(-steps // own)
    cycles = sum(-(-chip.vector_cycles(t.shape, t.dtype.bytes) // team) + math.ceil(chip.issue_cycles) for t in accumulators)
    moved = sum(t.elems * t.dtype.bytes for t in accumulators)
    return Share(points * team, 1, own, cycles, -(-moved // team), moved)


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
