"""The time of copies: between HBM and the chip one after the other, in what kernels leave of the memory bus; to and from the host over its
link, each way one after the other and both ways at once (it is PCIe, which is full duplex), whatever kernels do."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from tpuflow.device.timing.calibration import Machine
from tpuflow.device.timing.prices import PICOSECONDS, Clock, picoseconds
from tpuflow.isa.program import Copy, Program


@dataclass(frozen=True, slots=True)
class CopyRow:
    """A copy at its place in the Program, executed `count` times: the memories that it is from and to (`ends`), its bytes, how long they
    take alone on the memory bus or the host's link, and how much of it the chip waits for, with nothing left to do."""

    place: str
    count: int
    buffer: int
    ends: tuple[str, str]
    bytes: int
    picoseconds: int
    exposed_picoseconds: int = 0

    @property
    def is_host(self) -> bool:
        """Whether it goes over the host's link."""
        return "host" in self.ends

    @property
    def other(self) -> str:
        """The memory beside HBM."""
        return next(space for space in self.ends if space != "hbm")

    @property
    def exposed_seconds(self) -> float:
        """Of all executions."""
        return self.count * self.exposed_picoseconds / PICOSECONDS


def copy_row(program: Program, copy: Copy, machine: Machine, place: str, count: int) -> CopyRow:
    """One copy by itself; the cores move their parts of one to or from the chip at once."""
    source, target = program.buffers[copy.source], program.buffers[copy.target]
    ends, cores = (source.space, target.space), machine.chip.cores
    moved = min(source.bytes, target.bytes)  # of an item, that of HBM
    over_link = picoseconds(moved / machine.chip.host_bytes_per_second)
    alone = over_link if "host" in ends else Clock(machine, cores).bus(-(-moved // cores))
    return CopyRow(place, count, copy.target, ends, moved, alone)


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


@dataclass(slots=True)
class HostQueue:
    """Copies to and from the host on their way in one list of blocks, in time since its begin: each way one after the other."""

    machine: Machine
    free: dict[tuple[str, str], int] = field(default_factory=dict)
    arrivals: dict[int, tuple[CopyRow, int]] = field(default_factory=dict)

    def __contains__(self, semaphore: int) -> bool:
        return semaphore in self.arrivals

    def start(self, semaphore: int, row: CopyRow, now: int) -> tuple[int, int]:
        """When a copy is on the link: behind all that go its way."""
        begin = max(now, self.free.get(row.ends, 0))
        end = self.free[row.ends] = begin + row.picoseconds
        self.arrivals[semaphore] = row, end + picoseconds(self.machine.chip.dma_seconds)
        return begin, end

    def wait(self, semaphore: int, now: int) -> tuple[CopyRow, int]:
        """The copy, and for how long it is still waited for."""
        row, end = self.arrivals.pop(semaphore)
        exposed = max(0, end - now)
        return replace(row, exposed_picoseconds=exposed), exposed
