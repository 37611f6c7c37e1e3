"""One launch on the fast engine: which executable runs when, the arrays handed from each to the next, and how loops are sliced.

`FastEngine.start` makes an `Execution`, and `tpuflow.device.runtime` iterates over it: between two pieces a launch can be interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tpuflow.device.budget import Budget, OutOfBudget, Workload
from tpuflow.device.fast.cuts import HostLoop, Segment, Stage
from tpuflow.device.fast.host import Host
from tpuflow.device.fast.lanes import Lanes
from tpuflow.device.fast.liveness import AGAIN, WORK, Key
from tpuflow.device.launching import run_dry
from tpuflow.errors import LaunchAbandoned
from tpuflow.isa.collectives import whole_shape
from tpuflow.isa.program import Loop, Program, While
from tpuflow.jaxprs.processes import peers

SLICE_SECONDS = 1.0
"""How long one slice of a loop should take on the host. It is the longest that Ctrl-C waits for, and the interval of a progress bar."""
LEAST_TRIPS, LONGEST_SLICES = 2, 2
"""A slice has at least `LEAST_TRIPS` trips unless they take more than `LONGEST_SLICES` times `SLICE_SECONDS`: every launch of an executable
allocates its temporary memory anew, page by page, which is a fifth of the processor time of a step of YOLOv5s; the trips of a slice share
it."""
FIRST_SLICES = (1, 4)
"""Trips of the first slices of a loop, whose time is measured to choose the length of the others."""
GRACE_SECONDS = 2.0
"""How long Ctrl-C waits for the running executable to end by itself."""
POLL_SECONDS = 0.01
ALL_TRIPS = 2**31 - 1


@dataclass(slots=True)
class Pace:
    """The measured time of a loop's trips; kept from launch to launch, by stage."""

    slices: int = 0
    trip_seconds: float = 0.0

    def trips(self) -> int:
        """The number of trips of the next slice."""
        if self.slices < len(FIRST_SLICES):
            return FIRST_SLICES[self.slices]
        fitting = SLICE_SECONDS / max(self.trip_seconds, 1e-9)
        return int(min(ALL_TRIPS, max(1.0, fitting, min(LEAST_TRIPS, LONGEST_SLICES * fitting))))

    def took(self, seconds: float, trips: int) -> None:
        """Record the time of a slice."""
        self.slices, self.trip_seconds = self.slices + 1, seconds / trips


RunStage = Callable[[Stage, int, Mapping[Key, Any]], tuple[list[Any], dict[Key, Any]]]


@dataclass(frozen=True, slots=True)
class Counting:
    """The limits of a launch: a `budget` of work, with prices by the loop numbers of `workload`, and the infeeds, of which every port has
    `items`, the first of them number `start`."""

    budget: Budget
    workload: Workload
    start: int
    items: tuple[int, ...]

    def price(self, block: Loop | While) -> int:
        """The work of a trip of a loop; 0 if its trips are counted before the launch."""
        numbers = self.workload.numbers.get(id(block))
        return 0 if numbers is None else self.budget.trips[numbers[0]]


@dataclass(slots=True)
class Execution:
    """An iterator over the pieces of a launch: each `next` runs one, a stage or a slice of a loop. It gives the number of trips if that was
    a slice of a loop that is the Program's last block, else 0.

    `arrays` are handed from piece to piece, by key; `types` are the NumPy types in which buffers are. `sent` has the outfeed items sent so
    far, `totals` their number, with those that were lost for want of `capacity`. `run` runs a stage, on `host`; `waits` says whether a
    piece is waited for.

    Raises:
      LaunchError: an infeed has run dry.
      OutOfBudget: the work is beyond the limit.
      PeerError: a process that has a part of the chips is gone.
    """

    program: Program
    segments: tuple[Segment, ...]
    arrays: dict[Key, Any]
    counting: Counting
    capacity: int
    run: RunStage
    paces: dict[int, Pace]
    waits: bool
    lanes: Lanes
    host: Host
    types: Callable[[int], np.dtype[Any]]
    sent: list[list[np.ndarray]] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    _outputs: list[Any] | None = None
    _pieces: Iterator[int] | None = None

    def __post_init__(self) -> None:
        self.sent, self.totals = [[] for _ in self.program.outfeeds], [0 for _ in self.program.outfeeds]
        self._pieces = self._walk(self.segments)

    def __iter__(self) -> Execution:
        return self

    def __next__(self) -> int:
        assert self._pieces is not None
        with peers():
            return next(self._pieces)

    @property
    def outfeeds(self) -> list[np.ndarray]:
        """What each outfeed port has sent, stacked."""
        none = [np.empty((0, *whole_shape(p.shape, p.cut, self.program.mesh)), p.dtype.numpy) for p in self.program.outfeeds]
        return [np.concatenate(found) if len(found) > 1 else (found or [empty])[0] for found, empty in zip(self.sent, none, strict=True)]

    @property
    def latest(self) -> list[np.ndarray]:
        """What each outfeed port sent last, stacked: after a slice, its items."""
        return [found[-1] for found in self.sent]

    @property
    def outputs(self) -> list[Any]:
        """One array an output port, as of now. After a slice of the last block they are what a launch with fewer trips would have given,
        and the next slice overwrites them."""
        if self._outputs is not None:
            return self._outputs
        return self.lanes.outputs([self._array(p.buffer) for p in self.program.outputs], self.host)

    # ---- the walk

    def _walk(self, segments: Sequence[Segment]) -> Iterator[int]:
        for number, segment in enumerate(segments):
            ends = segments is self.segments and number == len(segments) - 1
            if isinstance(segment, HostLoop):
                yield from self._drive(segment)
            elif segment.loop is not None:
                for trips in self._slices(segment, segment.loop):
                    yield trips if ends else 0
            else:
                self._stage(segment, 0)
                yield 0
            self._forget(segment.after)

    def _drive(self, segment: HostLoop) -> Iterator[int]:
        """Run a loop on the host: the segments of its body one after the other, in every trip."""
        block = segment.block
        self._fill(segment.fills)
        if isinstance(block, Loop):
            for _ in range(self._number(block.trips)):
                self._count(block)
                yield from self._walk(segment.body)
            return
        while True:
            self._count(block)
            yield from self._walk(segment.condition)
            if not self._number(block.predicate):
                return
            yield from self._walk(segment.body)

    def _count(self, block: Loop | While) -> None:
        """Count the work of a trip of a loop whose trip count depends on data."""
        price = self.counting.price(block)
        if price:
            self.arrays[WORK] = np.int32(int(self.arrays[WORK]) + price)
            self._check_work()

    def _slices(self, stage: Stage, block: Loop | While) -> Iterator[int]:
        """Run all trips of a loop, in slices; yields the number of trips of each."""
        pace = self.paces.setdefault(id(stage), Pace())
        self._fill(stage.fills)
        left = self._number(block.trips) if isinstance(block, Loop) else ALL_TRIPS
        while left > 0:
            trips = min(left, pace.trips())
            began = time.perf_counter()
            self._stage(stage, trips)
            pace.took(self.host.max_over_devices(time.perf_counter() - began), trips)
            if isinstance(block, Loop):
                left -= trips
            elif not self.arrays.pop(AGAIN):
                left = 0
            yield trips

    def _stage(self, stage: Stage, trips: int) -> None:
        """Run one executable, wait for it if `waits` and it is no piece before others, and collect the outfeed items that it sent."""
        outputs, given = self.run(stage, trips, {k: self.arrays[k] for k in stage.takes})
        if self.waits and not stage.continued:
            _wait([*outputs, *given.values()])
        self.arrays.update(given)
        if stage.final:
            self._outputs = self.lanes.outputs(outputs, self.host)
        self._check_infeeds(stage)
        if WORK in given:
            self._check_work()
        for key in stage.gives:
            if not isinstance(key, int) and key[0] == "outfeed":
                self._harvest(key[1])

    def _harvest(self, port: int) -> None:
        count, items = int(self.arrays["sent", port]), self.arrays["outfeed", port]
        self.totals[port] += count
        self.sent[port].append(self.lanes.sent(port, self.host.values(items))[:count])
        self.arrays |= open_outfeed(self.program, self.lanes, port, self.capacity, self.host)

    def _check_infeeds(self, stage: Stage) -> None:
        there, start = self.counting.items, self.counting.start
        taken = [(key[1], self.arrays[key]) for key in stage.gives if not isinstance(key, int) and key[0] == "taken"]
        if any(int(n) > max(start, there[port]) for port, n in taken):
            raise run_dry(self.program.infeeds, [max(0, n - start) for n in there])

    def _check_work(self) -> None:
        if int(self.arrays[WORK]) > self.counting.budget.limit:
            raise OutOfBudget

    # ---- arrays

    def _number(self, buffer: int) -> int:
        return int(np.asarray(self._array(buffer)))

    def _array(self, buffer: int) -> Any:
        if buffer not in self.arrays:
            self._fill((buffer,))
        return self.arrays[buffer]

    def _fill(self, buffers: Sequence[int]) -> None:
        """Make the arrays of buffers that nothing has written: constants, or zeros."""
        constants = {c.buffer: c.data for c in self.program.constants}
        for index in buffers:
            if index not in self.arrays:
                b = self.program.buffers[index]
                data = constants.get(index)
                shape = self.lanes.shape(index, b.shape)
                partition = self.lanes.partition(self.lanes.axes(index))
                held = None if data is None else np.frombuffer(data, b.dtype.numpy).reshape(b.shape)
                if held is None:
                    self.arrays[index] = self.host.zeros(shape, self.types(index), partition)
                else:
                    self.arrays[index] = self.host.array(np.broadcast_to(held, shape), partition)

    def _forget(self, after: frozenset[int]) -> None:
        """Free the arrays of buffers that are dead."""
        for key in [k for k in self.arrays if isinstance(k, int) and k not in after]:
            del self.arrays[key]


def open_outfeed(program: Program, lanes: Lanes, port: int, capacity: int, host: Host) -> dict[Key, Any]:
    """The state of an outfeed port with room for so many items and none sent."""
    p = program.outfeeds[port]
    key = ("outfeed", port)
    zeros = host.zeros(lanes.shape(key, (capacity, *p.shape)), p.dtype.numpy, lanes.partition(lanes.axes(key)))
    return {("sent", port): np.int32(0), key: zeros}


def _wait(arrays: list[Any]) -> None:
    """Wait until all arrays are computed. On Ctrl-C, wait for at most `GRACE_SECONDS` more: a running executable cannot be stopped.

    Raises:
      LaunchAbandoned: Ctrl-C, and they were not computed in that time.
    """
    try:
        jax.block_until_ready(arrays)
    except KeyboardInterrupt as stop:
        until = time.perf_counter() + GRACE_SECONDS
        while not all(x.is_ready() for x in arrays):
            if time.perf_counter() > until:
                raise LaunchAbandoned(
                    "a piece of a launch that has no loop to be cut at is still under way; it goes on in the background to its end, and "
                    "this process does not end before it. What was computed is lost, and arguments that were donated are gone; the "
                    "executable can be launched again."
                ) from stop
            time.sleep(POLL_SECONDS)
        raise
