"""How a kernel is shared by the cores of a chip (tpuflow/chips/split_k.py): which kernels' steps can be worked out apart.

The accumulator is added up in the order of the grid whoever works out the steps: values do not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator

from tpuflow.chips.chip import Chip
from tpuflow.chips.split_k import Division, PartialSums, divide, may_split, partial_sums
from tpuflow.isa.instruction import Instruction, Tile
from tpuflow.isa.loop_nest import LoopNest
from tpuflow.isa.program import Kernel


def share(kernel: Kernel, chip: Chip) -> tuple[Division, PartialSums]:
    """The busiest core's share of a kernel, and what it adds up for others."""
    nest = LoopNest(kernel.grid)
    accumulators = tuple(_accumulators(kernel))
    splits = may_split(chip, nest.points, nest.steps) and _only_accumulates(kernel, accumulators)
    found = divide(chip, nest.points, nest.steps, splits=splits)
    return found, partial_sums(chip, [(t.shape, t.dtype.bytes) for t in accumulators], found.share)


def works_apart(kernel: Kernel) -> bool:
    """Whether cores may take steps of a point: each only adds to what others do."""
    return LoopNest(kernel.grid).steps > 1 and _only_accumulates(kernel, tuple(_accumulators(kernel)))


def _accumulators(kernel: Kernel) -> Iterator[Tile]:
    """Tiles that the body adds to, step after step."""
    written: set[Tile] = set()
    for instruction in kernel.body:
        if (tile := _accumulator(instruction)) is not None and tile not in written:
            yield tile
        written.update(instruction.writes())


def _accumulator(instruction: Instruction) -> Tile | None:
    """The tile that an instruction adds to; None if it is not stated to accumulate."""
    if not instruction.has("accumulates"):
        return None
    (tile,) = (value for _, kind, value in instruction.fields() if (kind.name, kind.role) == ("tile", "both"))
    return tile


def _only_accumulates(kernel: Kernel, accumulators: tuple[Tile, ...]) -> bool:
    """Whether steps touch what other steps wrote only by adding to an accumulator, so that they can be worked out apart."""
    made: set[Tile] = set()
    for instruction in kernel.body:
        carried = {t for t in instruction.reads() if t not in made and not _is_constant(t, kernel.prologue, kernel.body)}
        if carried - {_accumulator(instruction)}:
            return False
        made.update(t for t in instruction.writes() if t not in accumulators)
    return bool(accumulators)


def _is_constant(tile: Tile, prologue: tuple[Instruction, ...], body: tuple[Instruction, ...]) -> bool:
    """Written before the steps and by none of them."""
    return any(tile in set(i.writes()) for i in prologue) and not any(tile in set(i.writes()) for i in body)
