"""Errors of machine-level faults with their full place, and the shadow memory of HBM that finds races within a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpuflow.device.ordering import Event, Fault
from tpuflow.device.place import instruction_place, instruction_text, kernel_place, section_place, source_line
from tpuflow.device.resolved import QUEUE_NUMBER
from tpuflow.errors import HazardError
from tpuflow.isa.dma import Wait
from tpuflow.isa.instruction import QUEUES
from tpuflow.isa.program import Kernel


@dataclass(frozen=True, slots=True)
class Site:
    """The place of a fault: the kernel with its path, the instruction, and the grid index."""

    path: str
    kernel: Kernel
    number: int
    index: tuple[int, ...]

    def hazard(self, what: str) -> HazardError:
        """The error, naming the instruction, its place, the grid index and the source line."""
        place = instruction_place(self.path, self.kernel, self.number)
        line = source_line(self.kernel, self.number)
        text = instruction_text(self.kernel.instructions[self.number])
        return HazardError(f"{place}, at grid index {self.index}: {what}. Instruction: {text}.{f' Source: {line}.' if line else ''}")

    def fault(self, what: str, fault: Fault) -> HazardError:
        """The error of a faulty access to `what`."""
        return self.hazard(f"{what} {fault.what}{_other_text(self.kernel, fault.other)}")


def _other_text(kernel: Kernel, other: Event | None) -> str:
    if other is None:
        return ""
    number, point, step = other
    line = source_line(kernel, number)
    return f" (the other access: {section_place(kernel, number)} at point {point}, step {step}{f', {line}' if line else ''})"


def deadlock(path: str, kernel: Kernel, stuck: Sequence[tuple[Event, tuple[int, ...]]]) -> HazardError:
    """The error of a deadlock: the wait that comes first in program order, and the instructions that hold the other queues."""
    (number, _, _), index = min(stuck, key=lambda s: (s[0][1], s[0][2], s[0][0]))
    others = [section_place(kernel, n) for (n, _, _), _ in stuck if n != number]
    also = f"; also held: {', '.join(others)}" if others else ""
    instruction = kernel.instructions[number]
    assert isinstance(instruction, Wait), instruction  # nothing else holds a queue
    semaphore = instruction.semaphore
    what = f"semaphore {semaphore} never fires: no queue of {kernel_place(path, kernel)} can go on{also}"
    return Site(path, kernel, number, index).hazard(what)


Stamps = dict[tuple[str, int], np.ndarray]
_HBM_QUEUES = tuple(QUEUE_NUMBER[q] for q in QUEUES if q in ("scalar", "load", "store"))
_CLASHES = {
    ("read", "write"): "is read here while nothing orders that after its write",
    ("write", "write"): "is written twice with no order between the writes",
    ("write", "read"): "is overwritten here while nothing orders that after its last read",
}


class HbmShadow:
    """Shadow memory of a region of HBM: when each queue last read and wrote every granule, during one kernel.

    `stamps` has a table of times for each role ("read", "write") and queue. Times grow from kernel to kernel, so no table is ever cleared.
    """

    def __init__(self, granules: int):
        self.stamps: Stamps = {(role, q): np.zeros(granules, np.int64) for role in ("read", "write") for q in _HBM_QUEUES}
        self._events: dict[tuple[int, int], Event] = {}
        self._base = self._highest = 0

    def start(self) -> None:
        """Forget everything: a kernel starts (kernels are barriers)."""
        self._events.clear()
        self._base = self._highest

    def access(self, role: str, stamps: Stamps, queue: int, clock: Sequence[int], event: Event) -> Fault | None:
        """Note an access to the granules whose `stamps` these are; a fault if another queue's clashing one is not ordered before it."""
        for other in _HBM_QUEUES:
            for other_role in ("write",) if role == "read" else ("write", "read"):
                latest = int(stamps[other_role, other].max(initial=0)) - self._base
                if other != queue and latest > clock[other]:
                    return Fault(_CLASHES[role, other_role], self._events[other, latest])
        self._highest = max(self._highest, self._base + clock[queue])
        self._events[queue, clock[queue]] = event
        return None

    def stamp(self, clock_time: int) -> int:
        """What to write into the stamps of an access at a queue's time."""
        return self._base + clock_time
