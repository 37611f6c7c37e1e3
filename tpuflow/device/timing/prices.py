"""A kernel priced: every instruction with its time on its queue, for interior tiles and for the shorter ones at the edges.

All times are whole picoseconds, so that sums, and comparisons of one period with the next, are exact.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from tpuflow.chips.chip import Chip
from tpuflow.device.timing.calibration import Machine
from tpuflow.isa.cost import Cost
from tpuflow.isa.instruction import QUEUES, Instruction, Tile, TileAxis, Window
from tpuflow.isa.loop_nest import LoopNest
from tpuflow.isa.program import SECTIONS, Kernel
from tpuflow.isa.reuse import reuse

PICOSECONDS = 10**12
SCALAR, MATRIX, VECTOR, LOAD, STORE, LINK = range(len(QUEUES))
DO, MOVE, SIGNAL, WAIT, LOCAL, DRAW = range(6)
Edges = tuple[bool, ...]
"""For each of some ragged axes, whether the grid is at its last tile, the shorter one."""
Op = tuple[int, ...]
"""(DO, queue, time) | (MOVE, queue, set-up, time on the memory bus, latency) | (LOCAL, queue, time, latency) |
(DRAW, queue, time, time of the generator) | (SIGNAL | WAIT, queue, time, semaphore). A LOCAL move stays within the chip and leaves the bus
alone."""
Table = tuple[tuple[tuple[int, ...], tuple[tuple[Edges, Op], ...]], ...]
"""For every instruction of a section: the ragged axes that its cost depends on, and its `Op` for each combination of edges along them."""


def picoseconds(seconds: float) -> int:
    """Seconds in whole picoseconds, rounded up."""
    return math.ceil(seconds * PICOSECONDS)


@dataclass(frozen=True, slots=True)
class Clock:
    """The rates of one core while `cores` of its chip work side by side."""

    machine: Machine
    cores: int

    @property
    def chip(self) -> Chip:
        """The chip's row, with the fitted efficiencies."""
        return self.machine.rates

    def cycles(self, count: float) -> int:
        """Cycles in picoseconds."""
        return math.ceil(count * PICOSECONDS / self.chip.clock_hz)

    def bus(self, count_bytes: int, reads: int = 1) -> int:
        """Picoseconds for bytes at the core's share of the sustained HBM bandwidth; of `reads` equal loads only one misses the cache."""
        if not count_bytes:
            return 0
        rate = self.chip.core_bandwidth(self.cores)
        cached = max(rate, self.chip.core_cache_bytes_per_second)
        seconds = (1 / rate + (reads - 1) / cached) / reads  # a byte
        return math.ceil(count_bytes * PICOSECONDS * seconds)

    def local(self, count_bytes: int) -> int:
        """Picoseconds to move bytes between a resident buffer and a tile; at least as fast as from HBM, like cache hits."""
        rate = max(self.chip.core_bandwidth(self.cores), self.chip.core_resident_bytes_per_second)
        return math.ceil(count_bytes * PICOSECONDS / rate) if count_bytes else 0

    def op(self, instruction: Instruction, cost: Cost, reads: int = 1, *, pipelined: bool = False) -> Op:
        """What the scheduler needs to know of one execution; a load reads the same data `reads` times, all but once from the cache.

        The scalar unit waits for the latency of its moves. Those that follow one another directly are `pipelined`: only the first of them
        costs the latency.
        """
        queue = QUEUES.index(instruction.queue)
        if instruction.has("signals") or instruction.has("waits"):
            semaphore: int = instruction.semaphore  # type: ignore[attr-defined]
            return SIGNAL if instruction.has("signals") else WAIT, queue, self.cycles(cost.cycles), semaphore
        start_up, issue = picoseconds(self.chip.dma_seconds), self.cycles(cost.cycles + self.chip.issue_cycles)
        if queue in (LOAD, STORE) and cost.resident_bytes:
            return LOCAL, queue, issue + self.local(cost.resident_bytes), start_up
        if queue in (LOAD, STORE):
            return MOVE, queue, issue, self.bus(cost.bus_bytes, reads), start_up
        if queue == SCALAR:
            moving = self.bus(cost.bus_bytes) + self.local(cost.resident_bytes)
            return DO, queue, self.cycles(cost.cycles) + (moving + (0 if pipelined else start_up) if moving else 0)
        if cost.generator_cycles:
            return DRAW, queue, issue, self.cycles(cost.generator_cycles)
        return DO, queue, issue


@dataclass(frozen=True, slots=True)
class Priced:
    """One instruction: the `ragged_axes` that its cost depends on (indices into those of the kernel), and its cost for each combination of
    edges along them.

    A load reads the same data `reads` times over the grid, all but once from the chip's cache; `pipelined` is as of `Clock.op`.
    """

    instruction: Instruction
    ragged_axes: tuple[int, ...]
    costs: dict[Edges, Cost]
    reads: int = 1
    pipelined: bool = False


@dataclass(frozen=True, slots=True)
class PricedKernel:
    """A kernel with its `ragged` grid axes, whose last tile is shorter than the others, and its priced sections."""

    kernel: Kernel
    ragged: tuple[int, ...]
    sections: tuple[tuple[Priced, ...], ...]

    def edges(self, index: Sequence[int]) -> Edges:
        """The edges at a grid index."""
        grid = self.kernel.grid
        return tuple(index[a] == grid[a].size - 1 for a in self.ragged)

    def section_edges(self, section: int) -> Iterator[tuple[Edges, int]]:
        """Every combination of edges at which a section runs, and how often."""
        fixed = LoopNest(self.kernel.grid).fixed_indices(SECTIONS[section])
        kinds = []
        repeats = 1
        for axis, g in enumerate(self.kernel.grid):
            if axis not in self.ragged:
                repeats *= 1 if axis in fixed else g.size
            elif axis in fixed:
                kinds.append(((fixed[axis] == g.size - 1, 1),))
            else:
                kinds.append(((False, g.size - 1), (True, 1)))
        for combination in itertools.product(*kinds):
            times = repeats * math.prod(n for _, n in combination)
            if times:
                yield tuple(bit for bit, _ in combination), times

    def totals(self, tables: Sequence[Table]) -> Iterator[tuple[Priced, Cost, Op, int]]:
        """(instruction, its cost, what the scheduler knows of it by the `tables` of a plan, how often) over the whole grid."""
        for number, (section, table) in enumerate(zip(self.sections, tables, strict=True)):
            ops = [dict(by_edges) for _, by_edges in table]
            for edges, times in self.section_edges(number):
                for priced, op in zip(section, ops, strict=True):
                    own = tuple([edges[i] for i in priced.ragged_axes])
                    yield priced, priced.costs[own], op[own], times


def price(kernel: Kernel, machine: Machine, resident: Set[int] = frozenset()) -> PricedKernel:
    """The costs of every instruction of a kernel; resident: the Program's buffers that stay on the chip."""
    ragged = tuple(sorted({x.grid for i in kernel.instructions for t in _tiles(i) for x in t.axes if _is_ragged(x)}))
    times = reuse(kernel, machine.chip).times
    sections = tuple(
        _mark_pipelined([_priced(i, ragged, machine.rates, times, resident) for i in section]) for _, section in kernel.sections
    )
    return PricedKernel(kernel, ragged, sections)


def _mark_pipelined(section: Sequence[Priced]) -> tuple[Priced, ...]:
    """A section with the scalar unit's moves marked as pipelined that follow another in the same direction; signals may be in between."""
    marked, last = [], None
    for p in section:
        if p.instruction.has("signals"):
            marked.append(p)
            continue
        direction = type(p.instruction) if p.instruction.windowed and p.instruction.queue == "scalar" else None
        marked.append(replace(p, pipelined=True) if direction is not None and direction is last else p)
        last = direction
    return tuple(marked)


def _tiles(instruction: Instruction) -> Iterator[Tile]:
    yield from instruction.reads()
    yield from instruction.writes()


def _is_ragged(axis: TileAxis) -> bool:
    return axis.grid >= 0 and axis.extent % axis.size != 0


def _priced(
    instruction: Instruction,
    ragged: tuple[int, ...],
    chip: Chip,
    times: Mapping[Window, int],
    resident: Set[int],
) -> Priced:
    windows = [w for _, w in instruction.windows()]
    stays = any(w.buffer in resident for w in windows)
    felt = {x.grid for t in _tiles(instruction) for x in t.axes if _is_ragged(x)} if ragged else ()
    ragged_axes = tuple(i for i, axis in enumerate(ragged) if axis in felt)
    costs = {}
    for bits in itertools.product((False, True), repeat=len(ragged_axes)):
        last = {ragged[i] for i, bit in zip(ragged_axes, bits, strict=True) if bit}
        found = instruction.cost(chip, functools.partial(_shape, last))
        costs[bits] = found.within_chip() if stays else found
    reads = max((times.get(w, 1) for w in windows), default=1) if times else 1
    return Priced(instruction, ragged_axes, costs, reads)


def _shape(last: set[int], tile: Tile) -> tuple[int, ...]:
    """The valid shape of a tile where the axes `last` are at their last index."""
    if not last:
        return tile.shape
    return tuple(a.extent % a.size if a.grid in last and _is_ragged(a) else a.size for a in tile.axes)
