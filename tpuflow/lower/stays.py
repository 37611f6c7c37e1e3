"""Where the arrays of a Program could stay on the chip: always, from where they are made to a copy to HBM, or from a copy from HBM on.

A copy moves an array while kernels run, in what these leave of the memory bus. It is worth it where kernels move more of the array
meanwhile than the copy does, and where they gain more than they may have to wait for it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tpuflow.chips import Chip
from tpuflow.isa.core_parts import CoreParts
from tpuflow.isa.instruction import QUEUES, Tile
from tpuflow.isa.liveness import Timeline
from tpuflow.isa.loop_nest import LoopNest
from tpuflow.isa.program import Kernel, Program
from tpuflow.isa.reuse import reuse

COPIES_AHEAD = 8
"""Kernels at most that a copy from HBM goes ahead of its first reader: it takes place on the chip all that time."""
FEW_READERS = 32
"""A recurrent network's weights, unrolled, have hundreds of readers. If any of these might be a copy's first and any its last, choosing
would take a time of the third power of them."""
Site = tuple[str, int]
"""A place between blocks: the list of blocks by its path, and how many of its blocks come before."""


@dataclass(frozen=True, slots=True)
class Access:
    """What one kernel, at `tick`, moves from and to a buffer, in bytes of the bus. It `strays` if one core may touch what another has in
    its VMEM, and reads `apart` if what it reads may be elsewhere than what it writes."""

    tick: int
    read: int = 0
    written: int = 0
    strays: bool = False
    apart: bool = True

    @property
    def moved(self) -> int:
        """Both together."""
        return self.read + self.written


@dataclass(frozen=True, slots=True)
class Stay:
    """`buffer` on the chip from tick `first` to `last`; `accesses` are those of kernels that reach it there.

    With a copy, from HBM if it `loads`, else to it, it is there under another number; without one it is there all its life. What `loads` is
    only read there: a kernel that updates it writes it in HBM. The copy `begins` at one place and is `awaited` at another, and kernels at
    the ticks `meanwhile` run in between.
    """

    buffer: int
    first: int
    last: int
    accesses: tuple[Access, ...]
    saved_bytes: int
    begins: Site | None = None
    awaited: Site | None = None
    loads: bool = False
    meanwhile: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Needs:
    """What every kernel of a form needs: seconds to compute, bytes of the cache that hold what it reads `again`, and of each of its buffers
    in turn its number in the form, and what is read, written, whether a core may stray there, and whether it is read apart."""

    compute: float
    again: int
    moved: tuple[tuple[int, int, int, bool, bool], ...]


@dataclass(frozen=True, slots=True)
class Bus:
    """Seconds that each tick's kernel takes to compute, and keeps the memory bus `busy`, as far as can be told from costs; the accesses of
    every buffer; the bytes of the chip's cache that hold what it reads `again`. Ranges that are settled change `busy`."""

    program: Program
    a_byte: float
    accesses: Mapping[int, list[Access]]
    compute: list[float]
    busy: list[float]
    again: list[int]

    @classmethod
    def of(cls, program: Program, timeline: Timeline) -> Bus:
        """Before anything stays on the chip."""
        chip, nothing = program.chip, [0.0] * len(timeline.blocks)
        found = cls(
            program, 1 / (chip.cores * chip.core_bandwidth(chip.cores)), defaultdict(list), nothing, nothing.copy(), [0] * len(nothing)
        )
        forms, known = program.forms_by_id(), dict[Hashable, _Needs]()
        for tick, block in enumerate(timeline.blocks):
            if isinstance(block, Kernel):
                form = forms[id(block)]
                key = form.with_marks(lambda buffer: program.buffers[buffer].elems)
                if key not in known:
                    known[key] = found._needs(block, form.buffers)
                found._enter(tick, form.buffers, known[key])
        return found

    def copy(self) -> Bus:
        """The same, to settle stays in."""
        return replace(self, busy=self.busy.copy())

    @property
    def chip(self) -> Chip:
        """The chip's row."""
        return self.program.chip

    def _needs(self, kernel: Kernel, buffers: Sequence[int]) -> _Needs:
        nest, cached = LoopNest(kernel.grid), reuse(kernel, self.chip)
        parts = CoreParts.of(kernel, self.chip.keeping_cores)
        cycles: dict[str, float] = dict.fromkeys(QUEUES, 0.0)
        drawing = 0.0
        found: dict[int, dict[str, int]] = {}
        for name, section in kernel.sections:
            runs = nest.runs(name)
            for instruction in section:
                cost = instruction.cost(self.chip, _whole)
                cycles[instruction.queue] += runs * cost.cycles
                drawing += runs * cost.generator_cycles
                for role, window in instruction.windows():
                    moved = found.setdefault(window.buffer, {"read": 0, "write": 0, "strays": 0, "apart": role == "read"})
                    moved["strays"] += bool(parts.strays(window, self.program.buffers[window.buffer].elems))
                    moved[role] += runs * cost.bus_bytes // cached.times.get(window, 1)  # the others come from the cache
                    if instruction.has("updates"):
                        moved["read"] += 1  # the half of it that is read: enough to tell that it is
                        moved["apart"] = False
        compute = max(*cycles.values(), drawing) / self.chip.clock_hz / self.chip.cores
        numbered = [(buffers.index(b), m["read"], m["write"], m["strays"] > 0, bool(m["apart"])) for b, m in found.items()]
        return _Needs(compute, cached.bytes, tuple(numbered))

    def _enter(self, tick: int, buffers: Sequence[int], needs: _Needs) -> None:
        self.compute[tick], self.again[tick] = needs.compute, needs.again
        for number, read, written, strays, apart in needs.moved:
            self.accesses[buffers[number]].append(Access(tick, read, written, strays=strays, apart=apart))
            self.busy[tick] += self.a_byte * (read + written)

    def gains(self, stay: Stay, count_bytes: int) -> bool:
        """Whether kernels gain more by a stay than its copy may make the chip wait, or the chip does not wait."""
        compute, busy, a_byte = self.compute, self.busy, self.a_byte
        gained = [
            max(compute[t := a.tick], busy[t]) - max(compute[t], busy[t] - a_byte * a.moved) for a in stay.accesses
        ]  # what each kernel is faster without the moves
        waits = self.waits(count_bytes, stay.meanwhile)
        return not waits or sum(gained) > waits

    def waits(self, count_bytes: int, meanwhile: Iterable[int]) -> float:
        """Seconds by which a copy takes longer than these kernels, or needs more of the bus than they leave."""
        ticks, copying = list(meanwhile), self.a_byte * count_bytes
        late = self.chip.dma_seconds + copying - sum(max(self.compute[t], self.busy[t]) for t in ticks)
        return max(0.0, late, copying - sum(map(self.spare, ticks)))

    def move(self, stay: Stay, count_bytes: int) -> None:
        """A stay's accesses leave the bus, and its copy uses what kernels leave of it."""
        for access in stay.accesses:
            self.busy[access.tick] -= self.a_byte * access.moved
        needed = self.a_byte * count_bytes
        for tick in stay.meanwhile:
            used = min(needed, self.spare(tick))
            self.busy[tick] += used
            needed -= used

    def spare(self, tick: int) -> float:
        """What a kernel leaves."""
        return max(0.0, self.compute[tick] - self.busy[tick])


def _whole(tile: Tile) -> tuple[int, ...]:
    return tile.shape


@dataclass(frozen=True, slots=True)
class Stays:
    """Finds where buffers could stay. `lines`: the ticks of every list of blocks, one a block; `hosts`: buffers that something other than
    kernels touches."""

    program: Program
    timeline: Timeline
    bus: Bus
    lines: Mapping[str, Sequence[int]]
    hosts: frozenset[int]

    @classmethod
    def of(cls, program: Program, timeline: Timeline, bus: Bus, hosts: frozenset[int]) -> Stays:
        """Look at all lists of blocks."""
        lines: dict[str, list[int]] = defaultdict(list)
        for tick, place in enumerate(timeline.places):
            lines[_split(place)[0]].append(tick)
        return cls(program, timeline, bus, lines, hosts)

    def all(self, buffers: Sequence[int]) -> Iterator[Stay]:
        """Every stay of these buffers that moves fewer bytes of HBM, and in which every core that has a part of its own keeps to it."""
        yield from (stay for stay in self._all(buffers) if not any(a.strays for a in stay.accesses))

    def _all(self, buffers: Sequence[int]) -> Iterator[Stay]:
        given = {p.buffer for p in self.program.inputs} | {c.buffer for c in self.program.constants}
        ports = given | {p.buffer for p in self.program.outputs}
        for n in buffers:
            accesses = self.bus.accesses.get(n, ())
            if n in self.hosts or not accesses or not self.program.buffers[n].bytes:
                continue
            if n not in ports:
                yield Stay(n, *self.timeline.spans[n], tuple(accesses), sum(a.moved for a in accesses))
            if n not in given and not accesses[0].read:
                yield from self._from_the_start(n, accesses, kept=n in ports)
            yield from self._from_a_copy_on(n, accesses)

    def _from_the_start(self, n: int, accesses: Sequence[Access], *, kept: bool) -> Iterator[Stay]:
        """Made on the chip, copied to HBM behind its last write there, for whoever reads it later, or because it is `kept`."""
        path, _ = self._site(accesses[0])
        written = 0
        for j, access in enumerate(accesses if kept else accesses[:-1]):
            if self._site(access)[0] != path:
                return
            written = j if access.written else written
            saved = sum(a.moved for a in accesses[: j + 1]) - self.program.buffers[n].bytes
            if not self._is_worth(saved):
                continue
            begins = self._site(accesses[written])[1] + 1
            limit = self._within(path, accesses[j + 1]) if j + 1 < len(accesses) else None
            awaited = self._hidden(n, path, begins, len(self.lines[path]) if limit is None else limit)
            last = max(access.tick, self._end(path, awaited - 1))
            meanwhile = tuple(self.lines[path][begins:awaited])
            yield Stay(n, accesses[0].tick, last, tuple(accesses[: j + 1]), saved, (path, begins), (path, awaited), meanwhile=meanwhile)

    def _from_a_copy_on(self, n: int, accesses: Sequence[Access]) -> Iterator[Stay]:
        """Copied from HBM ahead of some readers."""
        sites = [self._site(a) for a in accesses]
        stops, read = _stops(accesses, [path for path, _ in sites]), [0, *itertools.accumulate(a.read for a in accesses)]
        reads = [replace(a, written=0) for a in accesses]
        written: Access | None = None
        for i, access in enumerate(accesses):
            path, position = sites[i]
            before = None if written is None else self._within(path, written)
            earliest = max(0 if before is None else before + 1, position - COPIES_AHEAD)
            saves = [(i + m, read[i + m] - read[i] - self.program.buffers[n].bytes) for m in _lengths(stops[i] - i)]
            worth = [(stop, saved) for stop, saved in saves if self._is_worth(saved)]
            if worth:
                begins, line = self._ahead(n, path, position, earliest), self.lines[path]
                meanwhile = tuple(line[begins:position])
                for stop, saved in worth:
                    here, last = tuple(reads[i:stop]), accesses[stop - 1].tick
                    yield Stay(n, line[begins], last, here, saved, (path, begins), (path, position), loads=True, meanwhile=meanwhile)
            written = access if access.written else written

    def _end(self, path: str, position: int) -> int:
        """The last tick of a block, nested ones included."""
        line = self.lines[path]
        if position + 1 < len(line):
            return line[position + 1] - 1
        return max(n for n, place in enumerate(self.timeline.places[line[-1] :], line[-1]) if place.startswith(path))

    def _is_worth(self, saved_bytes: int) -> bool:
        """Whether a copy saves more of the time of the memory bus than it takes to issue."""
        chip = self.bus.chip
        return saved_bytes * self.bus.a_byte > chip.issue_cycles / chip.clock_hz

    def _site(self, access: Access) -> Site:
        return _split(self.timeline.places[access.tick])

    def _within(self, path: str, access: Access) -> int | None:
        """Which block of a list an access lies in; None if it lies in another list."""
        place = self.timeline.places[access.tick]
        return int(place[len(path) :].partition(".")[0]) if place.startswith(path) else None

    def _hidden(self, n: int, path: str, begins: int, limit: int) -> int:
        """Where nothing waits for a copy that begins here, at most `limit`."""
        size, line, ends = self.program.buffers[n].bytes, self.lines[path], range(begins, min(limit, begins + COPIES_AHEAD))
        return next((at for at in ends if not self.bus.waits(size, line[begins:at])), max(begins, ends.stop))

    def _ahead(self, n: int, path: str, position: int, earliest: int) -> int:
        """How early a copy must begin that nothing waits for, at least `earliest`."""
        size, line = self.program.buffers[n].bytes, self.lines[path]
        return next((at for at in range(position, earliest, -1) if not self.bus.waits(size, line[at:position])), earliest)


def _stops(accesses: Sequence[Access], paths: Sequence[str]) -> list[int]:
    """Of every access, where those from it on end that read the same, within one list of blocks: the last may be an update."""
    stops: list[int] = []
    for i in reversed(range(len(accesses))):
        if accesses[i].written:
            stops.append(i + 1 if accesses[i].read and accesses[i].apart else i)
        else:
            stops.append(stops[-1] if stops and paths[i + 1] == paths[i] else i + 1)
    return stops[::-1]


def _lengths(most: int) -> Iterator[int]:
    """How many readers in a row share a copy: up to `FEW_READERS` any number, then twice as many each time, and all."""
    yield from range(1, min(most, FEW_READERS) + 1)
    if most > FEW_READERS:
        yield from itertools.takewhile(lambda n: n < most, (FEW_READERS << k for k in itertools.count(1)))
        yield most


def _split(place: str) -> Site:
    path, dot, position = place.rpartition(".")
    return path + dot, int(position)
