"""A model of a chip's shared cache: how often a kernel's loads hit it.

A window that does not move along a grid axis reads the same data in every trip along it. If all the data of one trip fit in the cache, the
later trips hit. Cores work on neighbouring points side by side: of the last two parallel axes they take the rectangle of points that reads
the fewest bytes, and go through its steps together. So the cache sees the grid in its order, with the points of a rectangle innermost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tpuflow.chips.chip import Chip
from tpuflow.isa.core_shares import divide_kernel
from tpuflow.isa.instruction import Window
from tpuflow.isa.program import Kernel

Moves = Mapping[Window, frozenset[int]]
"""The grid axes along which each window moves."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """`times`: for every window whose loads hit the cache, how often the same data are read. `bytes`: what they take of the cache."""

    times: Mapping[Window, int]
    bytes: int


def reuse(kernel: Kernel, chip: Chip) -> Reuse:
    """The cache hits of a kernel; none if the chip has no cache."""
    if not chip.cache_bytes:
        return Reuse({}, 0)
    trips = _Trips.of(kernel, chip)
    again = {w: loops for w, loops in trips.again(chip).items() if loops}
    times = {w: _times([trips.loops[at] for at in loops], kernel) for w, loops in again.items()}
    return Reuse(times, sum(trips.stretch_bytes(w, min(loops)) for w, loops in again.items()))


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop over a grid axis as the cache sees it: over the trips that cores run `at_once`, or over groups of such trips."""

    axis: int
    trips: int
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class _Trips:
    """A kernel's loops as the cache sees them, the outermost first, over `cores` cores. `moves`: the grid axes along which each window
    moves; `read`: the same of the windows that are only read."""

    moves: Moves
    read: Moves
    loops: Sequence[_Loop]
    cores: int

    @classmethod
    def of(cls, kernel: Kernel, chip: Chip) -> _Trips:
        """The loops of a kernel on a chip."""
        roles = {w: role for i in kernel.instructions for role, w in i.windows() if w.tile.axes}
        moves = {w: frozenset(g for axis in w.axes for g, _ in axis.grid) for w in roles}
        read = {w: moves[w] for w, role in roles.items() if role == "read"}
        division, _ = divide_kernel(kernel, chip)
        return cls(moves, read, _loops(kernel, _at_once(kernel, division.cores // division.cores_per_point, read)), division.cores)

    def again(self, chip: Chip) -> Mapping[Window, Sequence[int]]:
        """For every window that is read, the loops (by index) whose later trips hit the cache."""
        kept = [at for at, loop in enumerate(self.loops) if loop.trips > 1 and self._trip_bytes(at) <= chip.cache_bytes]
        return {w: [at for at in kept if self.loops[at].axis not in moved] for w, moved in self.read.items()}

    def _trip_bytes(self, at: int) -> int:
        """Bytes of all windows in one trip of a loop; of a loop over trips at once, in one step of all cores."""
        trip = sum(self.stretch_bytes(w, at) for w in self.moves)
        return trip * self.cores if self.loops[at].at_once else trip

    def stretch_bytes(self, window: Window, at: int) -> int:
        """Bytes of a window in one trip of a loop."""
        inner = [] if self.loops[at].at_once else self.loops[at + 1 :]
        return _bytes(window) * math.prod(x.trips for x in inner if x.axis in self.moves[window])


def _bytes(window: Window) -> int:
    return window.tile.elems * window.tile.dtype.bytes


def _times(loops: Sequence[_Loop], kernel: Kernel) -> int:
    """The product of the trips of some loops; the last group of an axis may be smaller."""
    trips: dict[int, int] = {}
    for loop in loops:
        trips[loop.axis] = min(trips.get(loop.axis, 1) * loop.trips, kernel.grid[loop.axis].size)
    return math.prod(trips.values())


def _loops(kernel: Kernel, at_once: Mapping[int, int]) -> list[_Loop]:
    """The grid's axes in order, over groups of trips, and inside of them the trips that cores run at once."""
    outer = [_Loop(a, -(-g.size // at_once.get(a, 1))) for a, g in enumerate(kernel.grid)]
    return [*outer, *(_Loop(a, trips, at_once=True) for a, trips in at_once.items())]


def _at_once(kernel: Kernel, cores: int, read: Moves) -> Mapping[int, int]:
    """Parallel axis -> the trips of it that `cores` cores run at once: a rectangle of the last two axes, and all trips of further axes as
    long as cores are left."""
    axes = [a for a in kernel.parallel if kernel.grid[a].size > 1]
    found = min(_rectangles(kernel, axes[-2:], cores), key=lambda sides: _bytes_read(sides, read))
    for a in reversed(axes[:-2]):
        left, size = cores // math.prod(found.values()), kernel.grid[a].size
        if size > left or any(n < kernel.grid[x].size for x, n in found.items()):
            break
        found = {a: size, **found}
    return found


def _rectangles(kernel: Kernel, axes: Sequence[int], cores: int) -> Iterator[Mapping[int, int]]:
    """The rectangles of at most `cores` points along at most two axes, as axis -> side."""
    if not axes:
        yield {}
        return
    *outer, last = axes
    for n in range(1, min(cores, kernel.grid[last].size) + 1):
        yield {a: min(cores // n, kernel.grid[a].size) for a in outer} | {last: n}


def _bytes_read(sides: Mapping[int, int], read: Moves) -> float:
    """Bytes that a core reads in a step; data that several cores of the rectangle read count in equal parts."""
    return sum(_bytes(w) / math.prod(n for a, n in sides.items() if a not in moved) for w, moved in read.items())
