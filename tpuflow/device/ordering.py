"""Race detection for a kernel's queues: vector clocks, joined at semaphores, and the cells of on-chip memory that they guard.

The verifier walks a kernel in program order with this, the reference engine in the order it really executes.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tpuflow.chips.chip import Chip
from tpuflow.isa.instruction import QUEUES, Tile
from tpuflow.isa.occupancy import slot_span
from tpuflow.isa.program import Kernel

Event = tuple[int, int, int]  # instruction number in the kernel, point, step


class Clocks:
    """A vector clock for each queue; a wait joins the clock of the signal that it takes (signals are first in, first out)."""

    __slots__ = ("_initial", "_signals", "now")

    def __init__(self, semaphores: Sequence[int]):
        self.now = [[0] * len(QUEUES) for _ in QUEUES]
        self._initial = list(semaphores)
        self._signals: list[deque[list[int]]] = [deque() for _ in semaphores]

    def tick(self, queue: int) -> list[int]:
        """Advance a queue to its next instruction; returns its clock."""
        clock = self.now[queue]
        clock[queue] += 1
        return clock

    def signal(self, semaphore: int, queue: int) -> None:
        """Raise a semaphore with the queue's clock: everything the queue did so far is complete."""
        self._signals[semaphore].append(self.now[queue].copy())

    def count(self, semaphore: int) -> int:
        """The value of a semaphore."""
        return self._initial[semaphore] + len(self._signals[semaphore])

    def wait(self, semaphore: int, queue: int) -> bool:
        """Lower a semaphore and join the clock of its signal; false if the semaphore is 0."""
        if self._initial[semaphore] > 0:
            self._initial[semaphore] -= 1
            return True
        if not self._signals[semaphore]:
            return False
        clock = self.now[queue]
        for i, t in enumerate(self._signals[semaphore].popleft()):
            if t > clock[i]:
                clock[i] = t
        return True


@dataclass(slots=True)
class Cell:
    """A stretch of memory that is always written and read as a whole: who wrote it last, and who read it since."""

    tile: int = -1
    point: int = -1
    step: int = -1
    queue: int = 0
    time: int = 0
    event: Event | None = None
    reads: dict[int, tuple[int, Event]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fault:
    """An access that must not happen: what is wrong with it, and the other access that it clashes with."""

    what: str
    other: Event | None = None


def read_order(cell: Cell, queue: int, clock: list[int], event: Event) -> Fault | None:
    """Note a read; a fault if the last write is not ordered before it."""
    if cell.time > clock[cell.queue]:
        return Fault("is read here while nothing orders that after its write", cell.event)
    cell.reads[queue] = (clock[queue], event)
    return None


def write_order(cell: Cell, queue: int, clock: list[int], event: Event) -> Fault | None:
    """Note a write; a fault if the last write, or a read of what it wrote, is not ordered before it."""
    for reader, (time, other) in cell.reads.items():
        if time > clock[reader]:
            return Fault("is overwritten here while nothing orders that after its last read", other)
    if cell.time > clock[cell.queue]:
        return Fault("is written twice with no order between the writes", cell.event)
    cell.queue, cell.time, cell.event = queue, clock[queue], event
    cell.reads.clear()
    return None


class TileCells:
    """On-chip memory of one kernel, cut at every place where a slot of some tile starts or ends."""

    def __init__(self, kernel: Kernel, tiles: Sequence[Tile], chip: Chip):
        self.tiles = tiles
        self._by_step = [any(a.grid >= 0 and kernel.grid[a.grid].kind == "sequential" for a in t.axes) for t in tiles]
        spans = [(t.space, *slot_span(t, slot, chip)) for t in tiles for slot in range(t.slots)]
        cuts = {space: sorted({edge for s, low, high in spans if s == space for edge in (low, high)}) for space in {s for s, _, _ in spans}}
        made: dict[tuple[str, int], Cell] = {}
        found = iter([_cells(cuts[space], space, low, high, made) for space, low, high in spans])
        self.cells = [[next(found) for _ in range(t.slots)] for t in tiles]

    def read(self, tile: int, slot: int, queue: int, clock: list[int], event: Event) -> Fault | None:
        """Note a read of a tile's slot; a fault if it is not what was last written there, at this point, in order."""
        for cell in self.cells[tile][slot]:
            if (cell.tile != tile or cell.point != event[1]) and (cell.tile < 0 or cell.time <= clock[cell.queue]):
                return self._not_there(cell, tile, event)
            fault = read_order(cell, queue, clock, event)
            if fault is not None:
                return fault
            if cell.step != event[2] and self._by_step[tile]:
                return Fault("was written at another step, when its blocked axis stood elsewhere", cell.event)
        return None

    def write(self, tile: int, slot: int, queue: int, clock: list[int], event: Event) -> Fault | None:
        """Note a write of a tile's slot; a fault if an earlier access is not ordered before it."""
        for cell in self.cells[tile][slot]:
            fault = write_order(cell, queue, clock, event)
            if fault is not None:
                return fault
            cell.tile, cell.point, cell.step = tile, event[1], event[2]
        return None

    def _not_there(self, cell: Cell, tile: int, event: Event) -> Fault:
        if cell.tile < 0:
            return Fault("is read before anything wrote it")
        if cell.tile == tile:
            return Fault("is read before anything wrote it at this point; it holds what an earlier point left", cell.event)
        other = self.tiles[cell.tile]
        return Fault(f"is read, but was last written as {other.dtype}{list(other.shape)} at {other.space}[{other.address:#x}]", cell.event)


def _cells(cuts: list[int], space: str, low: int, high: int, made: dict[tuple[str, int], Cell]) -> tuple[Cell, ...]:
    """The cells from byte low to high; a tile of no bytes gets one of its own, so that its reads still need a write."""
    if low == high:
        return (Cell(),)
    inside = cuts[bisect.bisect_left(cuts, low) : bisect.bisect_left(cuts, high)]
    return tuple(made.setdefault((space, edge), Cell()) for edge in inside)
