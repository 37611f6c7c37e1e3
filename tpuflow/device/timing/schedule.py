"""The six queues of one core in time: instructions in order on each, semaphores between them, and one memory bus.

Instructions are taken in program order, which semaphores make every queue agree with, so one pass over them is an event-driven
simulation: each starts when its queue is free and what it waits for has been signalled. A move has the bus for itself; of a load and a
store that want it at once, the earlier one in program order goes first and the other fills the gaps. A move of a buffer that stays on
the chip takes its queue alone. A queue is done with a move when the bus is; its start-up latency only delays what waits for the data.
Random words are drawn by a generator, one tile after the other, while the queue goes on: a register of them is used while the next is
drawn. What is signalled afterwards waits for the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from tpuflow.device.timing.prices import DO, DRAW, LOAD, LOCAL, MOVE, SIGNAL, STORE, WAIT, Op
from tpuflow.errors import ProgramError
from tpuflow.isa.instruction import QUEUES

OTHER = {LOAD: STORE, STORE: LOAD}


@dataclass(frozen=True, slots=True)
class Touched:
    """The queues and semaphores that some code uses: the state that a repetition of it advances."""

    queues: tuple[int, ...]
    semaphores: tuple[int, ...]

    @classmethod
    def by(cls, *sections: Sequence[Op]) -> Touched:
        """The queues and semaphores that these instructions use."""
        ops = [op for section in sections for op in section]
        return cls(tuple(sorted({op[1] for op in ops})), tuple(sorted({op[3] for op in ops if op[0] in (SIGNAL, WAIT)})))


class Core:
    """The state of one core, as times: `clock`, when each queue is free; `done`, when its work is complete; `signals`, the pending signals
    of each semaphore; `bus`, the intervals that loads and stores have taken. `waiter` is the queue that waits for each semaphore."""

    __slots__ = ("bus", "clock", "done", "signals", "waiter")

    def __init__(self, semaphores: Sequence[int], waiter: dict[int, int]):
        self.clock = [0] * len(QUEUES)
        self.done = [0] * len(QUEUES)
        self.signals = [deque([0] * count) for count in semaphores]
        self.bus: dict[int, deque[tuple[int, int]]] = {LOAD: deque(), STORE: deque()}
        self.waiter = waiter

    @property
    def end(self) -> int:
        """When everything is complete."""
        return max(*self.clock, *self.done)

    def run(self, ops: Sequence[Op]) -> None:
        """Take instructions in program order.

        Raises:
          ProgramError: a wait that nothing signals (the verifier refuses such Programs).
        """
        clock, done, signals = self.clock, self.done, self.signals
        for op in ops:
            kind, queue = op[0], op[1]
            if kind == DO:
                clock[queue] += op[2]
            elif kind == MOVE:
                clock[queue] = self._move(queue, clock[queue] + op[2], op[3])
                done[queue] = clock[queue] + op[4]
            elif kind == LOCAL:
                clock[queue] += op[2]
                done[queue] = clock[queue] + op[3]
            elif kind == DRAW:
                done[queue] = max(clock[queue], done[queue]) + op[3]
                clock[queue] += op[2]
            elif kind == SIGNAL:
                clock[queue] += op[2]
                signals[op[3]].append(max(clock[queue], done[queue]))
            else:
                if not signals[op[3]]:
                    raise ProgramError(f"queue {QUEUES[queue]} waits for semaphore {op[3]}, which nothing before it signals")
                clock[queue] = max(clock[queue], signals[op[3]].popleft()) + op[2]

    def _move(self, queue: int, start: int, work: int) -> int:
        """Occupy the bus for `work` picoseconds, from `start` on, in the gaps that the other direction leaves; returns the end."""
        taken, mine = self.bus[OTHER[queue]], self.bus[queue]
        while taken and taken[0][1] <= start:
            taken.popleft()
        at = start
        for begin, end in taken:
            if begin > at:
                if begin - at >= work:
                    break
                work -= begin - at
                mine.append((at, begin))
            at = max(at, end)
        mine.append((at, at + work))
        return at + work

    def earliest(self, path: Sequence[Op]) -> int:
        """A lower bound on the start of a path's last instruction: the path run as if every instruction took no time."""
        clock = self.clock.copy()
        waiting: dict[int, deque[int]] = {}
        for op in path:
            kind, queue = op[0], op[1]
            if kind == SIGNAL:
                self._copied(op[3], waiting).append(clock[queue])
            elif kind == WAIT and (signals := self._copied(op[3], waiting)):
                clock[queue] = max(clock[queue], signals.popleft())
        return clock[path[-1][1]]

    def _copied(self, semaphore: int, copies: dict[int, deque[int]]) -> deque[int]:
        if semaphore not in copies:
            copies[semaphore] = self.signals[semaphore].copy()
        return copies[semaphore]

    # ---- repetition

    def key(self, touched: Touched, floors: dict[int, int]) -> tuple[Hashable, int]:
        """(the state relative to a base time, the base time): from equal keys on, runs are the same but for the difference of base times.

        `floors` has, for a direction of the bus, a lower bound on the start of its later moves: intervals before it no longer matter.
        """
        clock, done = self.clock, self.done
        base = max(clock[q] for q in touched.queues)
        for queue, floor in floors.items():
            taken = self.bus[OTHER[queue]]
            while taken and taken[0][1] <= floor:
                taken.popleft()
        queues = tuple((clock[q] - base, max(done[q] - clock[q], 0)) for q in touched.queues)
        signals = tuple(tuple(max(t, clock[self.waiter[s]]) - base for t in self.signals[s]) for s in touched.semaphores)
        bus = tuple(tuple((b - base, e - base) for b, e in intervals) for intervals in self.bus.values())
        return (queues, signals, bus), base

    def shift(self, touched: Touched, by: int) -> None:
        """Advance the state of `touched` by a time, as that many repetitions would."""
        for queue in touched.queues:
            self.clock[queue] += by
            self.done[queue] += by
        for s in touched.semaphores:
            self.signals[s] = deque(t + by for t in self.signals[s])
        for queue, intervals in self.bus.items():
            self.bus[queue] = deque((b + by, e + by) for b, e in intervals)


def repeat(core: Core, times: int, once: Callable[[], None], touched: Touched, floors: Callable[[], dict[int, int]] | None) -> None:
    """Run `once` so many times. As soon as a state recurs, the repetition is periodic, and the remaining whole periods are added without
    running them; without `floors`, every repetition is run.
    """
    seen: dict[Hashable, tuple[int, int]] = {}
    number = 0
    while number < times:
        once()
        number += 1
        if floors is None or number == times or not touched.queues:
            continue
        key, base = core.key(touched, floors())
        if key not in seen:
            seen[key] = number, base
            continue
        before, base_before = seen[key]
        periods = (times - number) // (number - before)
        core.shift(touched, periods * (base - base_before))
        number += periods * (number - before)
        seen.clear()
