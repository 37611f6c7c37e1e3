"""What the timing engine finds: totals and a row for every kernel, as data and as text. Times are whole picoseconds inside."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from tpuflow.chips.chip import Chip
from tpuflow.device.timing.calibration import Calibration, Machine
from tpuflow.device.timing.collectives import CollectiveRow
from tpuflow.device.timing.copies import CopyRow
from tpuflow.device.timing.prices import PICOSECONDS
from tpuflow.isa.instruction import QUEUES
from tpuflow.isa.program import kernel_title


@dataclass(frozen=True, slots=True)
class Work:
    """What was done: multiply-adds of the matrix unit by operand type, results of the vector and scalar units, bytes by direction.

    `bus_bytes` counts whole bursts; `cached_bytes` are those of the bytes read that came from the chip's cache and not from HBM;
    `resident_read_bytes` and `resident_written_bytes` are of buffers that stay on the chip, also in whole bursts.
    """

    macs: Mapping[str, int]
    element_ops: int
    read_bytes: int
    written_bytes: int
    bus_bytes: int
    cached_bytes: int = 0
    resident_read_bytes: int = 0
    resident_written_bytes: int = 0

    @property
    def hbm_bytes(self) -> int:
        """Bytes moved to and from HBM."""
        return self.read_bytes + self.written_bytes - self.cached_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes moved to and from arrays that stay on the chip."""
        return self.resident_read_bytes + self.resident_written_bytes

    @property
    def flops(self) -> int:
        """Two for every multiply-add, one for every result of the vector and scalar units."""
        return 2 * sum(self.macs.values()) + self.element_ops

    def __add__(self, other: Work) -> Work:
        macs = {t: self.macs.get(t, 0) + other.macs.get(t, 0) for t in sorted({*self.macs, *other.macs})}
        return Work(macs, *map(operator.add, self._counts, other._counts))

    def __mul__(self, times: int) -> Work:
        return Work({t: n * times for t, n in self.macs.items()}, *(n * times for n in self._counts))

    @property
    def _counts(self) -> tuple[int, ...]:
        """All but the multiply-adds, in order."""
        return tuple(getattr(self, f.name) for f in fields(self)[1:])

    def roofline_seconds(self, machine: Machine) -> float:
        """No chip does it faster: the matrix peak, HBM or where arrays stay (each for what is moved there), whichever takes longest."""
        chip, local = machine.chip, max(self.resident_read_bytes, self.resident_written_bytes)
        matrix = sum(2 * n / chip.peak_flops(t) for t, n in self.macs.items())
        within = local / (chip.cores * chip.core_resident_bytes_per_second) if local else 0.0
        return max(matrix, self.hbm_bytes / chip.hbm_bytes_per_second, within)


NOTHING = Work({}, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel, once: its time with the launch floor, time of each queue summed over the busiest core's share, that of the memory bus,
    and its work."""

    name: str
    scope: str
    source: str
    grid: tuple[int, ...]
    cores: int
    picoseconds: int
    floor_picoseconds: int
    busy_picoseconds: tuple[int, ...]
    serial_picoseconds: int
    bus_picoseconds: int
    work: Work

    @property
    def idle_picoseconds(self) -> int:
        """What it leaves of the memory bus to copies."""
        return max(0, self.picoseconds - self.bus_picoseconds)

    @property
    def seconds(self) -> float:
        """Time of one execution."""
        return self.picoseconds / PICOSECONDS

    @property
    def bound(self) -> str:
        """What it waits for most: the busiest queue, or "launch" where the kernel floor is longer than any of them."""
        busiest = max(range(len(QUEUES)), key=self.busy_picoseconds.__getitem__)
        return QUEUES[busiest] if self.busy_picoseconds[busiest] > self.floor_picoseconds else "launch"


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A kernel at its place in the Program, executed `count` times."""

    place: str
    count: int
    time: KernelTime

    @property
    def picoseconds(self) -> int:
        """Time of all executions."""
        return self.count * self.time.picoseconds


@dataclass(frozen=True, slots=True)
class ProgramTime:
    """The modelled time of one launch of a Program, in the order of its kernels.

    `device_picoseconds` is the device's own time, `feed_picoseconds` what it waits for its data (infeeds slower than it, `step_seconds`),
    `launch_picoseconds` the host's round trip. `assumed` names blocks whose trips or branch nobody said: a while counts one trip, a
    switch its longest branch. `narrowed` says which f32 products are made of narrower ones, for want of f32 arrays. `trips` has the trips
    counted for every loop and while, and the branch of every switch, by their place. `collectives` and `copies` (between
    HBM and the chip or the host) are in the order of their waits.
    """

    machine: Machine
    device_picoseconds: int
    feed_picoseconds: int
    launch_picoseconds: int
    kernels: tuple[KernelRow, ...]
    work: Work
    feed_bytes: int
    assumed: tuple[str, ...] = ()
    narrowed: tuple[str, ...] = ()
    trips: Mapping[str, int] = field(default_factory=dict)
    collectives: tuple[CollectiveRow, ...] = ()
    copies: tuple[CopyRow, ...] = ()

    @property
    def copied_bytes(self) -> int:
        """What copies move between HBM and the chip or the host."""
        return sum(row.count * row.bytes for row in self.copies)

    @property
    def exposed_copy_seconds(self) -> float:
        """Time of copies that the chip waits for, with nothing left to do; part of `device_seconds`."""
        return sum(row.exposed_seconds for row in self.copies)

    @property
    def sent_bytes(self) -> int:
        """What each chip sends over its links."""
        return sum(row.count * row.sent_bytes for row in self.collectives)

    @property
    def link_seconds(self) -> float:
        """Time that collectives take until they have arrived, each for itself, hidden behind kernels or not."""
        return sum(row.seconds for row in self.collectives)

    @property
    def exposed_link_seconds(self) -> float:
        """Time of collectives that the chip waits for, with nothing left to do; part of `device_seconds`."""
        return sum(row.exposed_seconds for row in self.collectives)

    @property
    def chip(self) -> Chip:
        """The row of the chip it is modelled on."""
        return self.machine.chip

    @property
    def calibration(self) -> Calibration:
        """The fitted constants it stands on."""
        return self.machine.calibration

    @property
    def picoseconds(self) -> int:
        """Everything, from the host's call to its answer."""
        return self.device_picoseconds + self.feed_picoseconds + self.launch_picoseconds

    @property
    def seconds(self) -> float:
        """Everything, from the host's call to its answer."""
        return self.picoseconds / PICOSECONDS

    @property
    def device_seconds(self) -> float:
        """The device's own time, host and infeed aside."""
        return self.device_picoseconds / PICOSECONDS

    @property
    def busy_seconds(self) -> dict[str, float]:
        """Time that each queue of the busiest core works."""
        busy = {q: sum(r.count * r.time.busy_picoseconds[i] for r in self.kernels) / PICOSECONDS for i, q in enumerate(QUEUES)}
        return busy | {"link": busy["link"] + sum(row.sending_seconds for row in self.collectives)}

    @property
    def floor_seconds(self) -> float:
        """Time between kernels."""
        return sum(r.count * r.time.floor_picoseconds for r in self.kernels) / PICOSECONDS

    @property
    def joules_at_most(self) -> float | None:
        """Energy if the chip drew its greatest power all the time, the host's round trip included; None if its row has no power."""
        return self.chip.power_watts * self.seconds if self.chip.power_watts else None

    @property
    def overlap(self) -> float:
        """Share of the queues' work that other work hides: 0 when everything runs one after the other."""
        serial = sum(self.busy_seconds.values())
        exposed = self.device_seconds - self.floor_seconds
        return max(0.0, 1.0 - exposed / serial) if serial else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation: the matrix unit's work at its peak rate, as a share of the whole time."""
        ideal = sum(2 * n / self.chip.peak_flops(t) for t, n in self.work.macs.items())
        return ideal / self.seconds if self.seconds else 0.0

    @property
    def roofline_seconds(self) -> float:
        """The least time that the chip's peaks allow for this work."""
        return self.work.roofline_seconds(self.machine)

    @property
    def intensity(self) -> float:
        """Operations for every byte of HBM."""
        return self.work.flops / self.work.hbm_bytes if self.work.hbm_bytes else math.inf

    @property
    def provenance(self) -> str:
        """What every printed time must say."""
        return self.machine.provenance

    def by_bound(self) -> dict[str, float]:
        """Seconds of kernels by what bounds them."""
        found: dict[str, float] = {}
        for row in self.kernels:
            found[row.time.bound] = found.get(row.time.bound, 0.0) + row.picoseconds / PICOSECONDS
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def summary(self, steps: int = 1) -> str:
        """A few lines: time, utilisation, what it waits for; of one of so many equal steps, and then the launch's totals."""
        return "\n".join([*_summary(self, steps), *_totals(self, steps), *self.narrowed, *(f"assumed: {text}" for text in self.assumed)])

    def table(self, most: int = 30, steps: int = 1) -> str:
        """The kernels that take longest, a line each; what one of so many equal steps runs of them."""
        return "\n".join(_table(self, most, steps))


def seconds_text(seconds: float) -> str:
    """A time with the unit that suits it."""
    return _with_unit(seconds, "s")


def joules_text(joules: float) -> str:
    """An energy with the unit that suits it."""
    return _with_unit(joules, "J")


def _with_unit(amount: float, unit: str) -> str:
    for prefix, size in (("", 1.0), ("m", 1e-3), ("u", 1e-6)):
        if amount >= size:
            return f"{amount / size:.3f} {prefix}{unit}"
    return f"{amount * 1e9:.1f} n{unit}"


def _summary(t: ProgramTime, steps: int) -> list[str]:
    def each(picoseconds: int) -> str:
        return seconds_text(picoseconds / PICOSECONDS / steps)

    busy = ", ".join(f"{q} {s / t.device_seconds:.0%}" for q, s in t.busy_seconds.items() if s and t.device_seconds)
    bounds = ", ".join(f"{name} {seconds_text(s / steps)}" for name, s in t.by_bound().items())
    lines = [
        f"time {'' if steps == 1 else 'of a step '}{each(t.picoseconds)} ({t.provenance}): device {each(t.device_picoseconds)}, host "
        f"{each(t.launch_picoseconds)}, waiting for data {each(t.feed_picoseconds)}",
        f"matrix utilisation {t.mfu:.1%}; roofline {seconds_text(t.roofline_seconds / steps)}; {t.intensity:.1f} operations a byte; HBM "
        f"{t.work.read_bytes / steps / 1e6:.1f} MB read, {t.work.written_bytes / steps / 1e6:.1f} MB written{_within(t, steps)}; "
        f"{sum(r.count for r in t.kernels) / steps:.6g} kernels",
        f"queues busy: {busy or 'none'}; overlap {t.overlap:.0%}; bound by: {bounds or 'nothing'}",
    ]
    if t.joules_at_most is not None:
        joules = joules_text(t.joules_at_most / steps)
        lines.append(f"energy at most {joules}: {t.chip.power_watts:g} W, the chip's greatest power, all the time")
    if t.collectives:
        took, waited = seconds_text(t.link_seconds / steps), seconds_text(t.exposed_link_seconds / steps)
        count, sent = sum(r.count for r in t.collectives) / steps, t.sent_bytes / steps / 1e6
        lines.append(f"collectives {count:.6g}: {sent:.2f} MB sent by each chip in {took}, of which {waited} not behind kernels")
    return [*lines, *_copies(t, steps)]


def _copies(t: ProgramTime, steps: int) -> Iterator[str]:
    """Copies between HBM and every other memory."""
    for space in sorted({row.other for row in t.copies}, reverse=True):
        rows = [row for row in t.copies if row.other == space]
        count, moved = sum(r.count for r in rows) / steps, sum(r.count * r.bytes for r in rows) / steps / 1e6
        waited, where = seconds_text(sum(r.exposed_seconds for r in rows) / steps), "the host" if space == "host" else space.upper()
        yield f"copies between HBM and {where} {count:.6g}: {moved:.2f} MB, {waited} not behind kernels"


def _totals(t: ProgramTime, steps: int) -> list[str]:
    """What a launch of several steps is in all; of one step nothing more is to be said."""
    if steps == 1:
        return []
    energy = "" if t.joules_at_most is None else f", at most {joules_text(t.joules_at_most)}"
    kernels, moved = sum(r.count for r in t.kernels), t.work.hbm_bytes / 1e6
    return [f"round trip of {steps} steps: {seconds_text(t.seconds)}{energy}, {moved:.1f} MB of HBM traffic, {kernels} kernels"]


def _within(t: ProgramTime, steps: int) -> str:
    """What a step moves within the chip, if anything."""
    moved = t.work.resident_bytes
    return f", {moved / steps / 1e6:.1f} MB moved within {t.chip.array_space.upper()}" if moved else ""


def _table(t: ProgramTime, most: int, steps: int) -> list[str]:
    rows = sorted(t.kernels, key=lambda r: -r.picoseconds)[:most]
    heading = f"{'time':>12} {'share':>6} {'times':>6} {'bound':7} {'cores':>5} {'MMACs':>10} {'MB':>9}  kernel"
    return [heading, *(_row_text(r, max(t.device_picoseconds, 1), steps) for r in rows)]


def _row_text(row: KernelRow, whole_picoseconds: int, steps: int) -> str:
    k, share, count = row.time, row.picoseconds / whole_picoseconds, row.count / steps
    mmacs, megabytes = count * sum(k.work.macs.values()) / 1e6, count * k.work.hbm_bytes / 1e6
    took, title = seconds_text(row.picoseconds / PICOSECONDS / steps), kernel_title(k.scope, k.name)
    return f"{took:>12} {share:6.1%} {count:6.4g} {k.bound:7} {k.cores:5} {mmacs:10.1f} {megabytes:9.2f}  {title}"
