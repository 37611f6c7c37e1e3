"""The time of copies between HBM and the chip: one after the other, in what kernels leave of the memory bus."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from tpuflow.device.timing.calibration import Machine
from tpuflow.device.timing.prices import PICOSECONDS, Clock, picoseconds
from tpuflow.isa.program import Copy, Program


@dataclass(frozen=True, slots=True)
class CopyRow:
    """A copy at its place in the Program, executed `count` times: its bytes, how long they take alone on the memory bus, and how much of it
    the chip waits for, with nothing left to do."""

    place: str
    count: int
    buffer: int
    loads: bool
    bytes: int
    picoseconds: int
    exposed_picoseconds: int = 0

    @property
    def exposed_seconds(self) -> float:
        """Of all executions."""
        return self.count * self.exposed_picoseconds / PICOSECONDS


def copy_row(program: Program, copy: Copy, machine: Machine, place: str, count: int) -> CopyRow:
    """One copy by itself; the cores move their parts of it at once."""
    source, target = program.buffers[copy.source], program.buffers[copy.target]
    cores = machine.chip.cores
    alone = Clock(machine, cores).bus(-(-source.bytes // cores))
    return CopyRow(place, count, copy.target, target.is_resident, source.bytes, alone)


@dataclass(slots=True)
class _OnItsWay:
    """A copy, what of its time on the bus is left, and when it ends at the earliest."""

    semaphore: int
    row: CopyRow
    left: int
    earliest: int


@dataclass(slots=True)
class CopyQueue:
    """Copies on their way in one list of blocks, in time since its begin. The moves of kernels go first."""

    machine: Machine
    waiting: deque[_OnItsWay] = field(default_factory=deque)
    done: dict[int, _OnItsWay] = field(default_factory=dict)

    def __contains__(self, semaphore: int) -> bool:
        return semaphore in self.done or any(c.semaphore == semaphore for c in self.waiting)

    def start(self, semaphore: int, row: CopyRow, now: int) -> None:
        """A copy begins, behind all that are on their way."""
        start_up = picoseconds(self.machine.chip.dma_seconds)
        self.waiting.append(_OnItsWay(semaphore, row, row.picoseconds, now + start_up + row.picoseconds))

    def leave(self, idle: int) -> None:
        """A kernel leaves so much time of the bus to copies."""
        while self.waiting:
            first = self.waiting[0]
            used = min(idle, first.left)
            first.left -= used
            idle -= used
            if first.left:
                return
            self.done[first.semaphore] = self.waiting.popleft()

    def wait(self, semaphore: int, now: int) -> tuple[CopyRow, int]:
        """The copy, and for how long it is still waited for: those before it go first."""
        needed = 0
        while semaphore not in self.done:
            needed += self.waiting[0].left
            self.leave(self.waiting[0].left)
        found = self.done.pop(semaphore)
        exposed = max(needed, found.earliest - now, 0)
        return replace(found.row, exposed_picoseconds=exposed), exposed
