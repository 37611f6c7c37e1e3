"""The time of a whole Program: its blocks one after the other, kernels timed once for each structure, loops by their trips."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import assert_never

from tpuflow.device.timing.calibration import Calibration, Machine
from tpuflow.device.timing.collectives import CollectiveRow, LinkQueue, collective_row
from tpuflow.device.timing.copies import CopyQueue, CopyRow, HostQueue, copy_row
from tpuflow.device.timing.feeds import feed_of
from tpuflow.device.timing.grid import grid_time, plan_grid
from tpuflow.device.timing.prices import DRAW, LOCAL, MOVE, VECTOR, Clock, PricedKernel, Table, picoseconds, price
from tpuflow.device.timing.result import NOTHING, KernelRow, KernelTime, ProgramTime, Work
from tpuflow.device.timing.trips import known_trips
from tpuflow.dtypes import DType
from tpuflow.errors import ProgramError
from tpuflow.isa.calls import HostFunction
from tpuflow.isa.collectives import Await, Collective, Position
from tpuflow.isa.instruction import QUEUES, Instruction
from tpuflow.isa.matrix import MatmulAccumulate
from tpuflow.isa.program import Block, CallHost, Copy, Infeed, Kernel, Loop, Outfeed, Program, Switch, While, walk
from tpuflow.isa.splitting import SPLITS

REMEMBERED = 8192


def time_program(
    program: Program, trips: Mapping[str, int] | None = None, round_trips: int = 1, calibration: Calibration | None = None
) -> ProgramTime:
    """The modelled time of one launch (or of `round_trips` equal ones).

    trips: trip counts of loops and whiles, and branch numbers of switches, by their place ("3.body.0"). A loop that is not named runs
    as often as its trip count says if the Program itself gives it, else once; a while runs once; a switch takes its longest branch.
    calibration: the fitted constants; those that tpuflow has for the chip if None.

    Raises:
      ConfigError: the calibration is for other chips.
    """
    machine = Machine.of(program.chip, calibration)
    walk = _BlockTimes(program, machine, dict(trips or {}), known_trips(program), TimedKernels(program, machine))
    total = walk.blocks(program.code, "", 1)
    if not walk.fed:
        total.feed += picoseconds(machine.calibration.step_seconds)
    return ProgramTime(
        machine=machine,
        device_picoseconds=round_trips * total.device,
        feed_picoseconds=round_trips * total.feed,
        launch_picoseconds=round_trips * picoseconds(program.chip.launch_seconds),
        kernels=tuple(replace(r, count=round_trips * r.count) for r in total.rows),
        work=total.work * round_trips,
        feed_bytes=round_trips * total.feed_bytes,
        assumed=tuple(walk.assumed),
        narrowed=_narrowed(program),
        trips=walk.counted,
        collectives=tuple(replace(r, count=round_trips * r.count) for r in total.moved),
        copies=tuple(replace(r, count=round_trips * r.count) for r in total.copied),
    )


def _narrowed(program: Program) -> tuple[str, ...]:
    """What is said of f32 products that are made of narrower ones."""
    used = {i.precision for k in program.distinct_kernels() for i in k.body if isinstance(i, MatmulAccumulate)}
    rows = [row for name, row in SPLITS.items() if name in used]
    return tuple(
        f"f32 products enter the arrays of {program.chip.name} as {row.dtype}, in {len(row.passes)} pass{'' if row.parts == 1 else 'es'}"
        for row in rows
    )


def sink_time(program: Program, steps: int, round_trips: int = 1, calibration: Calibration | None = None) -> ProgramTime:
    """The modelled time of a sink's Program over `round_trips` launches of `steps` steps each.

    The sink is the loop whose trip count is an input of the Program; calibration is as of `time_program`.
    """
    inputs = {p.buffer for p in program.inputs}
    places = [place for place, block in walk(program.code) if isinstance(block, Loop) and block.trips in inputs]
    return time_program(program, dict.fromkeys(places, steps), round_trips, calibration)


def call_wait(machine: Machine, function: HostFunction) -> int:
    """Picoseconds for which the chip waits for what the host answers: what crosses its link, and a round trip of the host, which is taken
    to be as long as that of a launch; what the function itself takes is not known."""
    return picoseconds(function.bytes / machine.chip.host_bytes_per_second + machine.chip.launch_seconds)


@dataclass
class TimedKernels:
    """The kernels of one Program on one machine. Those that differ only in debug information, and in buffers of which the same ones stay on
    the chip, take the same time."""

    program: Program
    machine: Machine
    times: dict[Hashable, KernelTime] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._resident, self._forms = self.program.resident, self.program.forms_by_id()

    def of(self, kernel: Kernel) -> KernelTime:
        """`time_kernel` of a kernel."""
        key = self._forms[id(kernel)].with_marks(self._resident.__contains__)
        found = self.times.get(key)
        if found is None:
            found = self.times[key] = time_kernel(kernel, self.machine, self._resident)
        return replace(found, name=kernel.name, scope=kernel.scope, source=kernel.source)


def time_kernel(kernel: Kernel, machine: Machine, resident: Set[int] = frozenset()) -> KernelTime:
    """The modelled time of a kernel, its launch floor included; `resident` are the buffers that stay on the chip."""
    priced = price(kernel, machine, resident)
    plan, clock = plan_grid(priced, machine)
    floor = picoseconds(machine.calibration.kernel_seconds)
    busy, serial, bus, work = _totals(priced, plan.sections, clock)
    return KernelTime(
        name=kernel.name,
        scope=kernel.scope,
        source=kernel.source,
        grid=tuple(g.size for g in kernel.grid),
        cores=clock.cores,
        picoseconds=floor + _remembered(plan),
        floor_picoseconds=floor,
        busy_picoseconds=busy,
        serial_picoseconds=floor + serial + plan.combined,
        bus_picoseconds=bus + plan.combined + plan.collect,
        work=work,
    )


_remembered = functools.lru_cache(REMEMBERED)(grid_time)
"""Kernels that differ only in buffers and addresses have equal plans: each plan is run once a process."""


def _totals(priced: PricedKernel, tables: Sequence[Table], clock: Clock) -> tuple[tuple[int, ...], int, int, Work]:
    """Time of every queue as a mean over the cores, the sum of everything one after the other, time of the bus as a mean, and the work."""
    busy, drawing, serial, bus = [0] * len(QUEUES), 0, 0, 0
    macs: dict[str, int] = {}
    counts: dict[str, int] = dict.fromkeys(("element_ops", "read", "write", "bus", "cached", "resident read", "resident write"), 0)
    for found, cost, op, times in priced.totals(tables):
        instruction = found.instruction
        busy[op[1]] += times * sum(op[2:4] if op[0] == MOVE else op[2:3])
        drawing += times * (op[3] if op[0] == DRAW else 0)
        serial += times * sum(op[2:] if op[0] in (MOVE, LOCAL, DRAW) else op[2:3])
        bus += times * clock.bus(cost.bus_bytes, found.reads)
        counts["element_ops"] += times * cost.element_ops
        counts["bus"] += times * cost.bus_bytes
        counts["cached"] += times * cost.hbm_bytes * (found.reads - 1) // found.reads
        for role, _ in instruction.windows():
            counts[role] += times * cost.hbm_bytes
            counts[f"resident {role}"] += times * cost.resident_bytes
        if cost.macs:
            dtype = _multiplied(instruction).name
            macs[dtype] = macs.get(dtype, 0) + times * cost.macs
    work = Work(macs, *counts.values())
    busy[VECTOR] = max(busy[VECTOR], drawing)
    return tuple(b // clock.cores for b in busy), serial, bus // clock.cores, work


def _copied(row: CopyRow) -> Work:
    """What a copy moves: to or from HBM, and from or to the chip; the host's memory is not the chip's."""
    moved = {space: (row.bytes * (space == row.ends[0]), row.bytes * (space == row.ends[1])) for space in ("hbm", row.other)}
    (read, written), (resident_read, resident_written) = moved["hbm"], (0, 0) if row.is_host else moved[row.other]
    return Work({}, 0, read, written, bus_bytes=row.bytes, resident_read_bytes=resident_read, resident_written_bytes=resident_written)


def _multiplied(instruction: Instruction) -> DType:
    """The type of what an instruction with multiply-adds multiplies."""
    if not isinstance(instruction, MatmulAccumulate):
        raise ProgramError(f"instruction {instruction.mnemonic!r} costs multiply-adds of a type that is not known.")
    return instruction.a.dtype


@dataclass(slots=True)
class _Sum:
    """Blocks added up: device time, waiting for the host, rows, work, bytes of infeed and outfeed, collectives, copies."""

    device: int = 0
    feed: int = 0
    rows: list[KernelRow] = field(default_factory=list)
    work: Work = NOTHING
    feed_bytes: int = 0
    moved: list[CollectiveRow] = field(default_factory=list)
    copied: list[CopyRow] = field(default_factory=list)

    def add(self, other: _Sum, times: int) -> None:
        """Other blocks, so many times (their rows are counted already)."""
        self.device += times * other.device
        self.feed += times * other.feed
        self.rows += other.rows
        self.work = self.work + other.work * times
        self.feed_bytes += times * other.feed_bytes
        self.moved += other.moved
        self.copied += other.copied


@dataclass(slots=True)
class _Here:
    """One list of blocks so far, and what is on its way in it."""

    total: _Sum
    links: LinkQueue
    copies: CopyQueue
    host: HostQueue

    def start(self, semaphore: int, row: CopyRow) -> None:
        """A copy begins."""
        (self.host if row.is_host else self.copies).start(semaphore, row, self.total.device)

    def wait(self, semaphore: int) -> None:
        """The chip has nothing to do until this collective or copy has arrived."""
        total = self.total
        queue = next((queue for queue in (self.copies, self.host) if semaphore in queue), None)
        if queue is not None:
            copied, exposed = queue.wait(semaphore, total.device)
            total.copied.append(copied)
        else:
            sent, exposed = self.links.wait(semaphore, total.device)
            total.moved.append(replace(sent, exposed_picoseconds=exposed))
        total.device += exposed


@dataclass(slots=True)
class _BlockTimes:
    """Goes over the blocks of a Program; `known` are the trip counts that it says, `fed` whether the host feeds a loop of it."""

    program: Program
    machine: Machine
    trips: dict[str, int]
    known: Mapping[int, int]
    timed: TimedKernels
    assumed: list[str] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)
    fed: bool = False

    def blocks(self, code: Sequence[Block], path: str, count: int) -> _Sum:
        """All blocks of a list, in order."""
        here = _Here(_Sum(), LinkQueue(), CopyQueue(self.machine), HostQueue(self.machine))
        for i, block in enumerate(code):
            self._block(block, f"{path}{i}", count, here)
        return here.total

    def _block(self, block: Block, place: str, count: int, here: _Here) -> None:
        total = here.total
        match block:
            case Kernel():
                found = self.timed.of(block)
                total.rows.append(KernelRow(place, count, found))
                total.device += found.picoseconds
                total.work = total.work + found.work
                here.copies.leave(found.idle_picoseconds)
            case Loop():
                times = self._trips(place, block)
                body = self.blocks(block.body, f"{place}.body.", count * times)
                if feed := feed_of(self.program, block.body):
                    self.fed = True
                    body.feed += feed.wait(self.machine, body.device)
                total.add(body, times)
            case While():
                times = self._given(place, 1, "a while loop counted as one trip")
                total.add(self.blocks(block.condition, f"{place}.condition.", count * (times + 1)), times + 1)
                total.add(self.blocks(block.body, f"{place}.body.", count * times), times)
            case Switch():
                total.add(self._branch(block, place, count), 1)
            case Collective():
                here.links.start(block.semaphore, collective_row(self.program, block, place, count), total.device)
            case Copy():
                row = copy_row(self.program, block, self.machine, place, count)
                total.work = total.work + _copied(row)
                here.start(block.semaphore, row)
            case Await():
                here.wait(block.semaphore)
            case CallHost():
                total.feed += call_wait(self.machine, self.program.functions[block.function])
            case Infeed() | Outfeed():
                if feed := feed_of(self.program, (block,)):
                    total.feed_bytes += feed.bytes
            case Position():
                pass
            case _:
                assert_never(block)

    def _branch(self, block: Switch, place: str, count: int) -> _Sum:
        branches = [self.blocks(b, f"{place}.branch{i}.", count) for i, b in enumerate(block.branches)]
        longest = max(range(len(branches)), key=lambda i: branches[i].device)
        return branches[self._given(place, longest, f"a switch counted as branch {longest}, its longest")]

    def _trips(self, place: str, block: Loop) -> int:
        if place not in self.trips and (known := self.known.get(block.trips)) is not None:
            return self.counted.setdefault(place, max(0, known))
        return self._given(place, 1, "a loop whose trip count is not known counted as one trip")

    def _given(self, place: str, otherwise: int, why: str) -> int:
        if place not in self.trips:
            self.assumed.append(f"{place}: {why}")
        self.counted[place] = self.trips.get(place, otherwise)
        return self.counted[place]
