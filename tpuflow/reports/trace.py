"""A launch as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open: host, steps, layers, kernels and queues side by
side, with counters of memory, utilisation and links."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpuflow.chips.chip import Chip
from tpuflow.device.timing.collectives import LinkQueue, collective_row
from tpuflow.device.timing.copies import CopyQueue, CopyRow, HostQueue, copy_row
from tpuflow.device.timing.feeds import feed_of
from tpuflow.device.timing.prices import PICOSECONDS, picoseconds
from tpuflow.device.timing.program import call_wait
from tpuflow.device.timing.record import Event, record
from tpuflow.device.timing.result import KernelRow
from tpuflow.isa.collectives import Await, Collective
from tpuflow.isa.instruction import QUEUES
from tpuflow.isa.program import Block, CallHost, Copy, Kernel, Loop, Switch, While
from tpuflow.reports.files import write_json
from tpuflow.reports.memory import MIB
from tpuflow.reports.profile import Profile, place_in
from tpuflow.reports.tracks import Counters, Stretch, nested

HOST, CHIP = 1, 2
LAUNCHES, FEED = 1, 2
STEPS, LAYERS, KERNELS, COPIES, TO_HOST, FROM_HOST, FIRST_QUEUE = 1, 2, 3, 4, 5, 6, 10
TRIPS = 2
"""Trips of a loop that are shown one by one; the others are one event."""
DETAILED = 200
"""Kernels, the longest ones, of which tiles are shown."""
TILES = 48
"""Events a detailed kernel has at most; what is left of each queue's work is one event more."""
ROUND_TRIPS = 2
LIVE, USED, SENT = "HBM live MiB", "utilisation %", "links GB/s"
"""The counters: bytes of HBM by category; the matrix unit's and the HBM's work as a share of the time at peak; what a chip sends."""
_PER_NANOSECOND = PICOSECONDS // 10**9


def trace(profile: Profile, round_trips: int = ROUND_TRIPS) -> dict[str, Any]:
    """The trace of so many equal launches, the first with its kernels' tiles; times are microseconds."""
    tracer = _Tracer(profile)
    for number in range(round_trips):
        tracer.launch(number)
    other = {"program": profile.title, "times": profile.time.provenance, "steps a launch": profile.steps}
    return {"traceEvents": [*_names(), *tracer.tracks(), *tracer.events], "displayTimeUnit": "ns", "otherData": other}


def write_trace(profile: Profile, path: str | os.PathLike[str], round_trips: int = ROUND_TRIPS) -> None:
    """Write `trace` to a file.

    Raises:
      ConfigError: the file cannot be written.
    """
    write_json(path, trace(profile, round_trips), compact=True)


def _names() -> list[dict[str, Any]]:
    processes = {HOST: "host", CHIP: "chip (busiest core)"}
    threads = {(HOST, LAUNCHES): "round trips", (HOST, FEED): "infeed and outfeed", (CHIP, STEPS): "steps"}
    threads |= {(CHIP, LAYERS): "phases and layers", (CHIP, KERNELS): "kernels", (CHIP, COPIES): "copies between HBM and the chip"}
    threads |= {(CHIP, TO_HOST): "copies to the host", (CHIP, FROM_HOST): "copies from the host"}
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
    copies: CopyQueue = field(init=False)
    host: HostQueue = field(init=False)
    begun: dict[int, int] = field(default_factory=dict)  # of copies, by semaphore
    copied: int = 0  # when the copy that was awaited last had ended
    ticks: dict[str, int] = field(default_factory=dict)
    stretches: list[Stretch] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    used: dict[str, float] = field(default_factory=lambda: {"matrix": 0.0, "HBM": 0.0})  # picoseconds at peak, added up

    def __post_init__(self) -> None:
        self.copies = CopyQueue(self.profile.time.machine)
        self.host = HostQueue(self.profile.time.machine)
        self.ticks = {place: tick for tick, place in enumerate(self.profile.memory.places)}
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

    def tracks(self) -> Iterator[dict[str, Any]]:
        """The events of the rows that are drawn from all others: layers, and counters."""
        for s in nested(self.stretches):
            yield _complete(CHIP, LAYERS, s.name, s.begin, s.end, {})
        for name, at, values in self.counters.points:
            yield {"ph": "C", "name": name, "pid": CHIP, "ts": _microseconds(at // _PER_NANOSECOND), "args": dict(values)}

    def _blocks(self, code: Sequence[Block], path: str) -> None:
        for i, block in enumerate(code):
            self._block(block, f"{path}{i}")

    def _block(self, block: Block, place: str) -> None:
        trips = self.profile.time.trips.get(place, 1)
        self._live(place)
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
            case Copy():
                self._copy(block, copy_row(self.profile.program, block, self.profile.time.machine, place, 1))
            case Await():
                self._await(block)
            case CallHost():
                self._call_host(block)

    def _call_host(self, block: CallHost) -> None:
        function = self.profile.program.functions[block.function]
        wait = call_wait(self.profile.time.machine, function)
        self._event(CHIP, KERNELS, "wait for a call of the host", self.now, wait, {"bytes": function.bytes, "source": function.source})
        self.now += wait

    def _copy(self, block: Copy, row: CopyRow) -> None:
        if not row.is_host:
            self.copies.start(block.semaphore, row, self.now)
            self.begun[block.semaphore] = self.now
            return
        begin, end = self.host.start(block.semaphore, row, self.now)
        args = {"bytes": row.bytes, "buffer": row.buffer}
        self._event(CHIP, TO_HOST if row.ends[1] == "host" else FROM_HOST, "copy", begin, end - begin, args)

    def _await(self, block: Await) -> None:
        if block.semaphore in self.host:
            row, exposed = self.host.wait(block.semaphore, self.now)
            what, source = "copy to the host" if row.ends[1] == "host" else "copy from the host", ""
        elif block.semaphore in self.copies:
            row, exposed = self.copies.wait(block.semaphore, self.now)
            what, source = "copy", ""
            begin = max(self.begun.pop(block.semaphore), self.copied)
            self.copied = max(begin, self.now + exposed)
            args = {"bytes": row.bytes, "buffer": row.buffer, "to": row.ends[1].upper()}
            self._event(CHIP, COPIES, what, begin, self.copied - begin, args)
        else:
            sent, exposed = self.links.wait(block.semaphore, self.now)
            what, source = sent.kind, sent.source
        if exposed:
            self._event(CHIP, KERNELS, f"wait for {what}", self.now, exposed, {"source": source})
        self.now += exposed

    def _live(self, place: str) -> None:
        tick = self.ticks[place]
        live = self.profile.memory.live_bytes.items()
        self.counters.put(LIVE, self.now, {name: series[tick] / MIB for name, series in live if any(series)})

    def _utilisation(self, end: int, work: Mapping[str, float]) -> None:
        """From now to `end` so much of the time at peak is used, and after it nothing, unless more follows."""
        self.counters.put(USED, self.now, {name: 100 * busy / max(end - self.now, 1) for name, busy in work.items()})
        self.counters.put(USED, end, dict.fromkeys(work, 0.0))

    def _collective(self, block: Collective, place: str) -> None:
        row = collective_row(self.profile.program, block, place, 1)
        begin, end = self.links.start(block.semaphore, row, self.now)
        args = {"axes": ", ".join(row.axes), "bytes sent": row.sent_bytes, "source": row.source, "place": place}
        self._event(CHIP, FIRST_QUEUE + QUEUES.index("link"), row.kind, begin, end - begin, args)
        self.counters.put(SENT, begin, {"sent": row.sent_bytes / 1e9 * PICOSECONDS / max(end - begin, 1)})
        self.counters.put(SENT, end, {"sent": 0.0})

    def _loop(self, body: Sequence[Block], path: str, trips: int, after: tuple[Sequence[Block], str] = ((), "")) -> None:
        """The first trips in full, the others as one event, each as long as the first."""
        begin, detailed, used = self.now, self.detailed, dict(self.used)
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
            added = {name: (busy - used[name]) / TRIPS * (trips - TRIPS) for name, busy in self.used.items()}
            self._utilisation(self.now + rest, added)
            self.used = {name: busy + added[name] for name, busy in self.used.items()}
            self.now += rest
        self.detailed = detailed

    def _step(self, path: str, number: int, start: int) -> None:
        if path.count(".") == 2:  # an inner loop's trips would hide the outer one's
            self._event(CHIP, STEPS, f"trip {number}", start, self.now - start, {})

    def _fed(self, body: Sequence[Block], start: int) -> None:
        """The host sends the next trip's data while this one runs; what it takes longer, the chip waits."""
        feed, machine = feed_of(self.profile.program, body), self.profile.time.machine
        if feed is None:
            return
        self._event(HOST, FEED, "next batch", start, picoseconds(feed.seconds(machine)), {"bytes": feed.bytes})
        if wait := feed.wait(machine, self.now - start):
            self._event(CHIP, KERNELS, "wait for infeed", self.now, wait, {"bytes": feed.bytes})
            self.now += wait

    def _kernel(self, kernel: Kernel, place: str) -> None:
        row = self.rows[place]
        layer = place_in(row.time.scope, trains=self.trains)
        args = {
            "layer": layer.path, "phase": layer.phase, "source": row.time.source, "place": place, "bound": row.time.bound,
            "grid": "x".join(map(str, row.time.grid)), "macs": sum(row.time.work.macs.values()), "HBM bytes": row.time.work.hbm_bytes,
        }  # fmt: skip
        self._event(CHIP, KERNELS, row.time.name, self.now, row.time.picoseconds, args)
        begin, end = self.now + row.time.floor_picoseconds, self.now + row.time.picoseconds
        for e in self._queue_events(kernel, place, row):
            name = f"{row.time.name} (repeated tiles)" if e.repeats else row.time.name
            self._event(CHIP, FIRST_QUEUE + e.queue, name, begin + e.begin, e.end - e.begin, {})
        self.stretches.append(Stretch(self.now, end, (layer.phase, *filter(None, layer.path.split("/")))))
        work = _at_peak(row, self.profile.time.chip)
        self._utilisation(end, work)
        self.used = {name: busy + work[name] for name, busy in self.used.items()}
        self.copies.leave(row.time.idle_picoseconds)
        self.now = end

    def _queue_events(self, kernel: Kernel, place: str, row: KernelRow) -> tuple[Event, ...]:
        if not self.detailed or place not in self.longest:
            return tuple(Event(q, 0, busy, repeats=True) for q, busy in enumerate(row.time.busy_picoseconds) if busy)
        if kernel not in self.tiles:
            self.tiles[kernel] = _bounded(record(kernel, self.profile.time.machine, self.profile.program.resident))
        return self.tiles[kernel]

    def _event(self, process: int, thread: int, name: str, begin: int, duration: int, args: dict[str, Any]) -> None:
        self.events.append(_complete(process, thread, name, begin, begin + duration, args))


def _complete(process: int, thread: int, name: str, begin: int, end: int, args: dict[str, Any]) -> dict[str, Any]:
    """A "complete" event; begin and end are cut to whole nanoseconds, so that what meets or lies within still does."""
    at, to = begin // _PER_NANOSECOND, end // _PER_NANOSECOND
    found = {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": _microseconds(at), "dur": _microseconds(to - at)}
    return {**found, "args": args} if args else found


def _microseconds(nanoseconds: int) -> float:
    """The least number that is not less than so many nanoseconds when it is multiplied by 1000: Perfetto cuts what is below."""
    found = nanoseconds / 1000
    return found if found * 1000 >= nanoseconds else math.nextafter(found, math.inf)


def _at_peak(row: KernelRow, chip: Chip) -> dict[str, float]:
    """Picoseconds that a kernel's work takes the matrix unit and the HBM at their peaks."""
    work = row.time.work
    matrix = sum(2 * n / chip.peak_flops(t) for t, n in work.macs.items())
    return {"matrix": PICOSECONDS * matrix, "HBM": PICOSECONDS * work.hbm_bytes / chip.hbm_bytes_per_second}


def _bounded(events: Sequence[Event]) -> tuple[Event, ...]:
    """The first `TILES` events; of each queue's others one from their begin to their end."""
    rest: dict[int, Event] = {}
    for e in events[TILES:]:
        first = rest.get(e.queue, e)
        rest[e.queue] = Event(e.queue, first.begin, max(first.end, e.end), repeats=True)
    return (*events[:TILES], *rest.values())
