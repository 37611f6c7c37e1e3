"""A kernel made ready to run: each queue's instructions, their operands resolved, windows laid over HBM."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tpuflow.chips.chip import Chip
from tpuflow.device.ordering import QUEUE_NUMBER, TileCells
from tpuflow.device.place import SECTIONS
from tpuflow.device.reference.hazards import HbmShadow, Stamps
from tpuflow.device.reference.memory import Hbm, OnChip, WindowAccess
from tpuflow.device.uses import Use, uses
from tpuflow.isa.instruction import QUEUES, Tile
from tpuflow.isa.program import Kernel


@dataclass(frozen=True, slots=True)
class At:
    """One moment of a kernel: the point's number, the step's number in the point, the steps so far, the index of every grid axis."""

    point: int
    step: int
    count: int
    index: tuple[int, ...]


@dataclass(slots=True)
class Planned:
    """One instruction: its number in the kernel, its queue, the tiles it touches (by number), its window if it has one."""

    number: int
    instruction: Any
    queue: int
    signals: int
    waits: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    window: WindowAccess | None
    shadow: HbmShadow | None
    stamps: Stamps


class KernelPlan:
    """Everything about a kernel that does not depend on data, built once a Program."""

    def __init__(self, kernel: Kernel, chip: Chip, hbm: Hbm):
        self.kernel, self.hbm = kernel, hbm
        self._numbers: dict[Tile, int] = {}
        found = uses(kernel)
        self._shadows = _shadows(found, hbm)
        self.shadows = tuple({id(s): s for s in self._shadows.values()}.values())
        self.sections = self._sections(found)
        self.tiles: tuple[Tile, ...] = tuple(self._numbers)
        self.on_chip = OnChip(chip, self.tiles)
        self.problems = {n: problem for n, t in enumerate(self.tiles) if (problem := self.on_chip.problem(t))}
        self.points = math.prod(kernel.grid[g].size for g in kernel.parallel)
        self.steps = math.prod(kernel.grid[g].size for g in kernel.sequential)
        self._chip = chip

    def new_cells(self) -> TileCells:
        """On-chip memory that nothing has touched."""
        return TileCells(self.kernel, self.tiles, self._chip)

    def _sections(self, found: Sequence[Use]) -> dict[str, list[list[Planned]]]:
        """Instructions by section and queue."""
        sections: dict[str, list[list[Planned]]] = {name: [[] for _ in QUEUES] for name in SECTIONS}
        for use in found:
            sections[use.section][QUEUE_NUMBER[use.queue]].append(self._planned(use))
        return sections

    def _planned(self, use: Use) -> Planned:
        reads, writes = (tuple(self._numbers.setdefault(t, len(self._numbers)) for t in tiles) for tiles in (use.reads, use.writes))
        window = WindowAccess(use.windows[0][1], self.hbm) if use.windows else None
        shadow = self._shadows.get(window.window.buffer) if window is not None else None
        stamps: Stamps = {}
        if window is not None and shadow is not None:
            stamps = {key: window.view(self.hbm.granules(window.window.buffer, table)) for key, table in shadow.stamps.items()}
        queue = QUEUE_NUMBER[use.queue]
        return Planned(use.number, use.instruction, queue, use.signals, use.waits, reads, writes, window, shadow, stamps)

    def stream(self, queue: int) -> Iterator[tuple[Planned, At]]:
        """A queue's instructions over the whole grid, in the order in which it executes them."""
        prologue, body, epilogue = (self.sections[s][queue] for s in SECTIONS)
        if not (prologue or body or epilogue):
            return
        grid = self.kernel.grid
        steps = list(itertools.product(*(range(grid[g].size) for g in self.kernel.sequential)))
        first = tuple(0 for _ in self.kernel.sequential)
        last = tuple(max(0, grid[g].size - 1) for g in self.kernel.sequential)
        final = max(0, self.steps - 1)
        for n, point in enumerate(itertools.product(*(range(grid[g].size) for g in self.kernel.parallel))):
            start = n * self.steps
            yield from _all_at(prologue, At(n, 0, start, point + first))
            if body:
                for s, step in enumerate(steps):
                    yield from _all_at(body, At(n, s, start + s, point + step))
            yield from _all_at(epilogue, At(n, final, start + final, point + last))


def _all_at(section: list[Planned], at: At) -> Iterator[tuple[Planned, At]]:
    for planned in section:
        yield planned, at


def _shadows(found_uses: Sequence[Use], hbm: Hbm) -> dict[int, HbmShadow]:
    """The region's shadow for every buffer that two queues may clash on."""
    accesses = {(w.buffer, role, QUEUE_NUMBER[u.queue]) for u in found_uses for role, w in u.windows}
    accesses |= {(w.buffer, "read", QUEUE_NUMBER[u.queue]) for u in found_uses if u.is_indexed_store for _, w in u.windows}
    found: dict[int, HbmShadow] = {}
    for (x, role, queue), (y, other_role, other) in itertools.combinations(sorted(accesses), 2):
        clash = queue != other and "write" in (role, other_role)
        if clash and hbm.buffers[x].elems and y in hbm.overlapping(x):
            found[x] = found[y] = hbm.region(x).shadow
    return found
