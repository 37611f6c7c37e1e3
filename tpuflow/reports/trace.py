"""A launch as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open: host, steps, kernels and queues side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tpuflow.device.timing.collectives import LinkQueue, collective_row
from tpuflow.device.timing.prices import PICOSECONDS, picoseconds
from tpuflow.device.timing.program import fed_wait, is_fed
from tpuflow.device.timing.record import Event, record
from tpuflow.device.timing.result import KernelRow
from tpuflow.isa.collectives import Await, Collective
from tpuflow.isa.instruction import QUEUES
from tpuflow.isa.program import Block, Infeed, Kernel, Loop, Outfeed, Switch, While
from tpuflow.reports.files import write_json
from tpuflow.reports.profile import Profile, place_in

HOST, CHIP = 1, 2
LAUNCHES, FEED = 1, 2
STEPS, KERNELS, FIRST_QUEUE = 1, 2, 10
TRIPS = 2
"""Trips of a loop that are shown one by one; the others are one event."""
DETAILED = 200
"""Kernels, the longest ones, of which tiles are shown."""
TILES = 48
"""Events a detailed kernel has at most; what is left of each queue's work is one event more."""
ROUND_TRIPS = 2
_PER_MICROSECOND = PICOSECONDS // 10**6


def trace(profile: Profile, round_trips: int = ROUND_TRIPS) -> dict[str, Any]:
    """The trace of so many equal launches, the first with its kernels' tiles; times are microseconds."""
    tracer = _Tracer(profile)
    for number in range(round_trips):
        tracer.launch(number)
    other = {"program": profile.name, "times": profile.time.provenance, "steps a launch": profile.steps}
    return {"traceEvents": [*_names(), *tracer.events], "displayTimeUnit": "ns", "otherData": other}


def write_trace(profile: Profile, path: str | os.PathLike[str], round_trips: int = ROUND_TRIPS) -> None:
    """Write `trace` to a file.

    Raises:
      ConfigError: the file cannot be written.
    """
    write_json(path, trace(profile, round_trips), compact=True)


def _names() -> list[dict[str, Any]]:
    processes = {HOST: "host", CHIP: "chip (busiest core)"}
    threads = {(HOST, LAUNCHES): "round trips", (HOST, FEED): "infeed and outfeed", (CHIP, STEPS): "steps", (CHIP, KERNELS): "kernels"}
    threads |= {(CHIP, FIRST_QUEUE + i): f"{name} queue" for i, name in enumerate(QUEUES)}
    named = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in processes.items()]
    named += [{"ph": "M", "name": "thread_name", "pid": p, "tid": t, "args": {"name": name}} for (p, t), name in threads.items()]
    return named + [{"ph": "M", "name": "thread_sort_index", "pid": p, "tid": t, "args": {"sort_index": t}} for p, t in threads]


@dataclass(slots=True)
class _Tracer:
    """Goes over the blocks as the timing engine does; `now` is the time in picoseconds."""

    profile: Profile
    now: int = 0
    detailed: bool = True
    events: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[str, KernelRow] = field(default_factory=dict)
    longest: frozenset[str] = frozenset()
    tiles: dict[Kernel, tuple[Event, ...]] = field(default_factory=dict)
    trains: bool = False
    links: LinkQueue = field(default_factory=LinkQueue)

    def __post_init__(self) -> None:
        self.rows = {r.place: r for r in self.profile.time.kernels}
        self.longest = frozenset(k.place for k in self.profile.kernels[:DETAILED])
        self.trains = any(k.phase == "backward" for k in self.profile.kernels)

    def launch(self, number: int) -> None:
        """One round trip: the host prepares and is told, in between the chip works."""
        gap = picoseconds(self.profile.time.chip.launch_seconds)
        self._event(CHIP, STEPS, "idle: host gap", self.now, gap, {"host round trip": number})
        begin = self.now
        self.now += gap
        self.detailed = number == 0
        self._blocks(self.profile.program.code, "")
        what = f"launch {number}, {self.profile.steps} steps" if self.profile.steps > 1 else f"launch {number}"
        self._event(HOST, LAUNCHES, what, begin, gap, {"steps": self.profile.steps})

    def _blocks(self, code: Sequence[Block], path: str) -> None:
        for i, block in enumerate(code):
            self._block(block, f"{path}{i}")

    def _block(self, block: Block, place: str) -> None:
        trips = self.profile.time.trips.get(place, 1)
        match block:
            case Kernel():
                self._kernel(block, place)
            case Loop():
                self._loop(block.body, f"{place}.body.", trips)
            case While():
                self._blocks(block.condition, f"{place}.condition.")
                self._loop(block.body, f"{place}.body.", trips, (block.condition, f"{place}.condition."))
            case Switch():
                self._blocks(block.branches[trips], f"{place}.branch{trips}.")
            case Collective():
                self._collective(block, place)
            case Await():
                row, exposed = self.links.wait(block.semaphore, self.now)
                if exposed:
                    self._event(CHIP, KERNELS, f"wait for {row.kind}", self.now, exposed, {"source": row.source})
                self.now += exposed

    def _collective(self, block: Collective, place: str) -> None:
        row = collective_row(self.profile.program, block, place, 1)
        begin, end = self.links.start(block.semaphore, row, self.now)
        args = {"axes": ", ".join(row.axes), "bytes sent": row.sent_bytes, "source": row.source, "place": place}
        self._event(CHIP, FIRST_QUEUE + QUEUES.index("link"), row.kind, begin, end - begin, args)

    def _loop(self, body: Sequence[Block], path: str, trips: int, after: tuple[Sequence[Block], str] = ((), "")) -> None:
        """The first trips in full, the others as one event, each as long as the first."""
        begin, detailed = self.now, self.detailed
        for number in range(min(trips, TRIPS)):
            self.detailed = detailed and number == 0
            start = self.now
            self._blocks(body, path)
            self._fed(body, start)
            self._blocks(*after)
            self._step(path, number, start)
        if trips > TRIPS:
            rest = (self.now - begin) // TRIPS * (trips - TRIPS)
            self._event(CHIP, STEPS, f"{trips - TRIPS} more trips", self.now, rest, {"each as long as": "the ones before"})
            self.now += rest
        self.detailed = detailed

    def _step(self, path: str, number: int, start: int) -> None:
        if path.count(".") == 2:  # an inner loop's trips would hide the outer one's
            self._event(CHIP, STEPS, f"trip {number}", start, self.now - start, {})

    def _fed(self, body: Sequence[Block], start: int) -> None:
        """The host sends the next trip's data while this one runs; what it takes longer, the chip waits."""
        program = self.profile.program
        ports = [(program.infeeds if isinstance(b, Infeed) else program.outfeeds)[b.port] for b in body if isinstance(b, Infeed | Outfeed)]
        moved, machine = sum(p.dtype.bytes * _elems(p.shape) for p in ports), self.profile.time.machine
        if not is_fed(body):
            return
        self._event(HOST, FEED, "next batch", start, picoseconds(moved / machine.chip.host_bytes_per_second), {"bytes": moved})
        if wait := fed_wait(machine, moved, self.now - start):
            self._event(CHIP, KERNELS, "wait for infeed", self.now, wait, {"bytes": moved})
            self.now += wait

    def _kernel(self, kernel: Kernel, place: str) -> None:
        row = self.rows[place]
        layer = place_in(row.time.scope, trains=self.trains)
        args = {
            "layer": layer.path, "phase": layer.phase, "source": row.time.source, "place": place, "bound": row.time.bound,
            "grid": "x".join(map(str, row.time.grid)), "macs": sum(row.time.work.macs.values()), "HBM bytes": row.time.work.hbm_bytes,
        }  # fmt: skip
        self._event(CHIP, KERNELS, row.time.name, self.now, row.time.picoseconds, args)
        begin = self.now + row.time.floor_picoseconds
        for e in self._queue_events(kernel, place, row):
            self._event(CHIP, FIRST_QUEUE + e.queue, "repeated tiles" if e.repeats else "tile", begin + e.begin, e.end - e.begin, {})
        self.now += row.time.picoseconds

    def _queue_events(self, kernel: Kernel, place: str, row: KernelRow) -> tuple[Event, ...]:
        if not self.detailed or place not in self.longest:
            return tuple(Event(q, 0, busy, repeats=True) for q, busy in enumerate(row.time.busy_picoseconds) if busy)
        if kernel not in self.tiles:
            self.tiles[kernel] = _bounded(record(kernel, self.profile.time.machine, self.profile.program.resident))
        return self.tiles[kernel]

    def _event(self, process: int, thread: int, name: str, begin: int, duration: int, args: dict[str, Any]) -> None:
        at, long = begin / _PER_MICROSECOND, duration / _PER_MICROSECOND
        self.events.append(
            {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": at, "dur": long, **({"args": args} if args else {})}
        )


def _bounded(events: Sequence[Event]) -> tuple[Event, ...]:
    """The first `TILES` events; of each queue's others one from their begin to their end."""
    rest: dict[int, Event] = {}
    for e in events[TILES:]:
        first = rest.get(e.queue, e)
        rest[e.queue] = Event(e.queue, first.begin, max(first.end, e.end), repeats=True)
    return (*events[:TILES], *rest.values())


def _elems(shape: Sequence[int]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n
