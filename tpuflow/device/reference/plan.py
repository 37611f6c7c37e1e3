"""A kernel made ready to run: each queue's instructions, their operands resolved, windows laid over HBM."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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

    def __init__(self, kernel: Kernel, on_chip: OnChip, hbm: Hbm):
        self.kernel, self.hbm = kernel, hbm
        self._numbers: dict[Tile, int] = {}
        found = uses(kernel)
        self._shadows = _shadows(found, hbm)
        self.shadows = tuple({id(s): s for s in self._shadows.values()}.values())
        self.sections = self._sections(found)
        self.tiles: tuple[Tile, ...] = tuple(self._numbers)
        self.on_chip, self.reach = on_chip, on_chip.reach(self.tiles)
        self.problems = {n: problem for n, t in enumerate(self.tiles) if (problem := self.on_chip.problem(t))}
        self.points = math.prod(kernel.grid[g].size for g in kernel.parallel)
        self.steps = math.prod(kernel.grid[g].size for g in kernel.sequential)

    def new_cells(self) -> TileCells:
        """On-chip memory that nothing has touched."""
        return TileCells(self.kernel, self.tiles, self.on_chip.chip)

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
        first = tuple(0 for _ in self.kernel.sequential)
        last = tuple(max(0, grid[g].size - 1) for g in self.kernel.sequential)
        final = max(0, self.steps - 1)
        for n, point in enumerate(_indices([grid[g].size for g in self.kernel.parallel])):
            start = n * self.steps
            yield from _all_at(prologue, At(n, 0, start, point + first))
            if body:
                for s, step in enumerate(_indices([grid[g].size for g in self.kernel.sequential])):
                    yield from _all_at(body, At(n, s, start + s, point + step))
            yield from _all_at(epilogue, At(n, final, start + final, point + last))


def _indices(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All indices of a grid, row-major, one at a time (`itertools.product` holds every axis in memory)."""
    if not sizes:
        yield ()
        return
    for outer in _indices(sizes[:-1]):
        for i in range(sizes[-1]):
            yield (*outer, i)


def _all_at(section: list[Planned], at: At) -> Iterator[tuple[Planned, At]]:
    for planned in section:
        yield planned, at


_Access = tuple[int, str, int]  # buffer, role, queue


def _shadows(found_uses: Sequence[Use], hbm: Hbm) -> dict[int, HbmShadow]:
    """The region's shadow for every buffer that two queues may clash on."""
    accesses = {(w.buffer, role, QUEUE_NUMBER[u.queue]) for u in found_uses for role, w in u.windows}
    accesses |= {(w.buffer, "read", QUEUE_NUMBER[u.queue]) for u in found_uses if u.is_indexed_store for _, w in u.windows}
    clashing: set[int] = set()
    for (x, role, queue), (y, other_role, other) in _sharing(accesses, hbm):
        if queue != other and "write" in (role, other_role):
            clashing |= {x, y}
    return {x: hbm.region(x).shadow for x in clashing}


def _sharing(accesses: Iterable[_Access], hbm: Hbm) -> Iterator[tuple[_Access, _Access]]:
    """Pairs of accesses to buffers that share a byte."""
    order = sorted((a for a in accesses if hbm.buffers[a[0]].bytes), key=lambda a: (hbm.buffers[a[0]].address, a))
    open_: list[_Access] = []
    for access in order:
        start = hbm.buffers[access[0]].address
        open_ = [a for a in open_ if hbm.buffers[a[0]].address + hbm.buffers[a[0]].bytes > start]
        yield from ((a, access) for a in open_)
        open_.append(access)
