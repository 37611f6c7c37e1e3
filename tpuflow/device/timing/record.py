"""What the queues of the busiest core do in a kernel, tile by tile, with repeating periods as one event."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from tpuflow.device.timing.calibration import Machine
from tpuflow.device.timing.grid import GridPlan, GridRun, plan_grid
from tpuflow.device.timing.prices import SIGNAL, WAIT, Op, price
from tpuflow.device.timing.schedule import Core, Touched
from tpuflow.isa.program import Kernel


@dataclass(frozen=True, slots=True)
class Event:
    """Work of a queue from one time to another (picoseconds since the kernel's start); `repeats` stands for periods added up."""

    queue: int
    begin: int
    end: int
    repeats: bool = False


def record(kernel: Kernel, machine: Machine, resident: Set[int] = frozenset()) -> tuple[Event, ...]:
    """Every piece of work of the busiest core's queues, neighbours joined, in order of time; `resident` buffers stay on the chip."""
    plan, _ = plan_grid(price(kernel, machine, resident), machine)
    return record_plan(plan)


def record_plan(plan: GridPlan) -> tuple[Event, ...]:
    """As `record`, of a kernel's plan."""
    run = GridRun(plan, unroll=False)
    core = _Recorder(run.core)
    run.core = core
    run.time()
    return tuple(sorted(_joined(core.events), key=lambda e: (e.begin, e.queue)))


class _Recorder(Core):
    """A core that writes down what its queues do; waits and signals aside."""

    __slots__ = ("events",)

    def __init__(self, core: Core):
        super().__init__([len(s) for s in core.signals], core.waiter)
        self.events: list[Event] = []

    def run(self, ops: Sequence[Op]) -> None:
        """One instruction at a time, each looked at."""
        for op in ops:
            kind, queue = op[0], op[1]
            before = self.clock[queue]
            super().run((op,))
            if kind not in (SIGNAL, WAIT) and self.clock[queue] > before:
                self.events.append(Event(queue, before, self.clock[queue]))

    def shift(self, touched: Touched, by: int) -> None:
        """Periods that are added without being run: one event for each queue that works in them."""
        if by:
            self.events += [Event(q, self.clock[q], self.clock[q] + by, repeats=True) for q in touched.queues]
        super().shift(touched, by)


def _joined(events: Sequence[Event]) -> list[Event]:
    """Neighbours of one queue without a gap between them as one."""
    joined: dict[int, list[Event]] = {}
    for e in events:
        line = joined.setdefault(e.queue, [])
        if line and line[-1].end == e.begin and line[-1].repeats == e.repeats:
            line[-1] = Event(e.queue, line[-1].begin, e.end, e.repeats)
        else:
            line.append(e)
    return [e for line in joined.values() for e in line]
