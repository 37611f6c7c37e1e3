"""A second, slow simulation of a kernel's queues: events in the order of time, written apart from the engine that it judges.

Queues hold their whole instruction streams. The bus serves, of the moves that want it, the one that comes first in the program,
interrupting another; nothing is known ahead of time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from typing import Any

from tpuflow.device.timing.grid import GridPlan
from tpuflow.device.timing.prices import DO, DRAW, LOCAL, MOVE, SIGNAL


def stream(plan: GridPlan) -> list[Any]:
    """Every instruction of the busiest core's points, in program order."""
    parallel = [n for n, sequential in plan.grid if not sequential]
    steps = [n for n, sequential in plan.grid if sequential]
    found = []

    def section(number: int, index: tuple[int, ...]) -> None:
        bits = tuple(index[a] == plan.grid[a][0] - 1 for a in plan.ragged)
        for ragged_axes, table in plan.sections[number]:
            found.append(dict(table)[tuple(bits[i] for i in ragged_axes)])

    for point in itertools.islice(itertools.product(*map(range, parallel)), plan.points):
        trips = list(itertools.product(*map(range, steps)))
        section(0, point + trips[0])
        for trip in trips[: plan.steps]:
            section(1, point + trip)
        section(2, point + trips[-1])
    return found


class Queue:
    """One queue: its instructions (each with its number in the program), and what it is doing."""

    def __init__(self) -> None:
        self.todo: deque[tuple[int, Any]] = deque()
        self.until = 0  # busy until then (not counting a move on the bus)
        self.complete = 0  # when all its moves have arrived
        self.moving: list[int] | None = None  # [number in the program, work left]


def oracle_time(plan: GridPlan) -> int:
    """Picoseconds until everything is complete."""
    queues: dict[int, Queue] = defaultdict(Queue)
    for number, op in enumerate(stream(plan)):
        queues[op[1]].todo.append((number, op))
    signals = [deque([0] * n) for n in plan.semaphores]  # times at which what was signalled may be taken
    now = 0
    while True:
        progressed = True
        while progressed:
            progressed = sum(_start(q, now, signals) for q in queues.values()) > 0
        moving = sorted((q.moving[0], k) for k, q in queues.items() if q.moving is not None and q.until <= now)
        times = [q.until for q in queues.values() if q.until > now]
        times += [t for s in signals for t in s if t > now]
        if moving:
            served = queues[moving[0][1]]
            assert served.moving is not None
            times.append(now + served.moving[1])
        if not times:
            break
        then = min(times)
        if moving:
            served = queues[moving[0][1]]
            assert served.moving is not None
            served.moving[1] -= then - now
        now = then
        for q in queues.values():
            if q.moving is not None and q.moving[1] == 0 and q.until <= now:
                q.complete, q.moving, q.until = now + q.moving[2], None, now
    assert not any(q.todo for q in queues.values()), "a queue waits for ever"
    end = max((max(q.until, q.complete) for q in queues.values()), default=0)
    return max(end, plan.combined) + (plan.combine + plan.collect if plan.combined else 0)


def _start(q: Queue, now: int, signals: list[deque[int]]) -> bool:
    """Start the queue's next instruction if it is free to."""
    if not q.todo or q.until > now or q.moving is not None:
        return False
    number, op = q.todo[0]
    if op[0] == DO:
        q.until = now + op[2]
    elif op[0] == LOCAL:
        q.until = now + op[2]
        q.complete = q.until + op[3]
    elif op[0] == DRAW:
        q.until, q.complete = now + op[2], max(now, q.complete) + op[3]
    elif op[0] == MOVE:
        q.until = now + op[2]
        q.moving = [number, op[3], op[4]]
        if op[3] == 0:
            q.moving, q.complete = None, q.until + op[4]
    elif op[0] == SIGNAL:
        q.until = now + op[2]
        signals[op[3]].append(max(q.until, q.complete))
    else:
        waiting = signals[op[3]]
        if not waiting or waiting[0] > now:
            return False
        waiting.popleft()
        q.until = now + op[2]
    q.todo.popleft()
    return True


__all__ = ["oracle_time", "stream"]
