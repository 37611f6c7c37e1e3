"""How the cores of a chip divide a kernel (tpuflow/chips/split_k.py), and which kernels they may divide by sequential steps.

This is about time and placement only: an accumulator is always summed in the order of the grid, so values do not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator

from tpuflow.chips.chip import Chip
from tpuflow.chips.split_k import Division, PartialSums, divide, may_split, partial_sums
from tpuflow.isa.instruction import Instruction, Tile
from tpuflow.isa.loop_nest import LoopNest
from tpuflow.isa.program import Kernel


def divide_kernel(kernel: Kernel, chip: Chip) -> tuple[Division, PartialSums]:
    """How a chip's cores divide a kernel, and the cost of reducing their partial sums."""
    nest = LoopNest(kernel.grid)
    accumulators = tuple(_accumulators(kernel))
    splits = may_split(chip, nest.points, nest.steps) and _only_accumulates(kernel, accumulators)
    found = divide(chip, nest.points, nest.steps, splits=splits)
    return found, partial_sums(chip, [(t.shape, t.dtype.bytes) for t in accumulators], found.cores_per_point)


def can_split_steps(kernel: Kernel) -> bool:
    """Whether several cores may run steps of one point: whether the steps only accumulate."""
    return LoopNest(kernel.grid).steps > 1 and _only_accumulates(kernel, tuple(_accumulators(kernel)))


def _accumulators(kernel: Kernel) -> Iterator[Tile]:
    """Tiles that the body accumulates into from step to step."""
    written: set[Tile] = set()
    for instruction in kernel.body:
        if (tile := _accumulator(instruction)) is not None and tile not in written:
            yield tile
        written.update(instruction.writes())


def _accumulator(instruction: Instruction) -> Tile | None:
    """The tile that an instruction accumulates into; None if it does not declare that it accumulates."""
    if not instruction.has("accumulates"):
        return None
    (tile,) = (value for _, kind, value in instruction.fields() if (kind.name, kind.role) == ("tile", "both"))
    return tile


def _only_accumulates(kernel: Kernel, accumulators: tuple[Tile, ...]) -> bool:
    """Whether accumulators are the only tiles that carry anything from one step to the next."""
    made: set[Tile] = set()
    for instruction in kernel.body:
        carried = {t for t in instruction.reads() if t not in made and not _is_constant(t, kernel.prologue, kernel.body)}
        if carried - {_accumulator(instruction)}:
            return False
        made.update(t for t in instruction.writes() if t not in accumulators)
    return bool(accumulators)


def _is_constant(tile: Tile, prologue: tuple[Instruction, ...], body: tuple[Instruction, ...]) -> bool:
    """Whether the prologue writes a tile and the body does not."""
    return any(tile in set(i.writes()) for i in prologue) and not any(tile in set(i.writes()) for i in body)
