"""What a chip's shared cache saves: how often a kernel reads again what it read shortly before.

A window that does not move along a grid axis reads the same data on every trip of it. Where all that the kernel moves in one trip fits
in the cache, the later trips read it there. Cores take neighbouring points in turn, of the last two axes of points a rectangle that reads
as few bytes as any, and step through them side by side, so that the cache sees the points that are at work at once in every step, and
else the grid in its order.
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
    """For every window that is read again from the cache, how often the same data are read in all; and the `bytes` of the cache that hold
    them until they are."""

    times: Mapping[Window, int]
    bytes: int


def reuse(kernel: Kernel, chip: Chip) -> Reuse:
    """What a kernel reads again from the chip's cache; nothing where it has none."""
    if not chip.cache_bytes:
        return Reuse({}, 0)
    trips = _Trips.of(kernel, chip)
    again = {w: loops for w, loops in trips.again(chip).items() if loops}
    times = {w: _times([trips.loops[at] for at in loops], kernel) for w, loops in again.items()}
    return Reuse(times, sum(trips.stretch_bytes(w, min(loops)) for w, loops in again.items()))


@dataclass(frozen=True, slots=True)
class _Loop:
    """Some trips of a grid axis: those that cores are `at_once` at, or those of such groups, one after the other."""

    axis: int
    trips: int
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class _Trips:
    """The grid axes that move each window of a kernel's arrays, those that are `read` alone as well, and the loops that all `cores` go
    through, the slowest first."""

    moves: Moves
    read: Moves
    loops: Sequence[_Loop]
    cores: int

    @classmethod
    def of(cls, kernel: Kernel, chip: Chip) -> _Trips:
        """Look at a kernel on a chip."""
        roles = {w: role for i in kernel.instructions for role, w in i.windows() if w.tile.axes}
        moves = {w: frozenset(g for axis in w.axes for g, _ in axis.grid) for w in roles}
        read = {w: moves[w] for w, role in roles.items() if role == "read"}
        division, _ = divide_kernel(kernel, chip)
        return cls(moves, read, _loops(kernel, _at_once(kernel, division.cores // division.cores_per_point, read)), division.cores)

    def again(self, chip: Chip) -> Mapping[Window, Sequence[int]]:
        """Of every window that is read, the loops along whose trips the same data are read again from the cache."""
        kept = [at for at, loop in enumerate(self.loops) if loop.trips > 1 and self._trip_bytes(at) <= chip.cache_bytes]
        return {w: [at for at in kept if self.loops[at].axis not in moved] for w, moved in self.read.items()}

    def _trip_bytes(self, at: int) -> int:
        """Bytes of all windows in one trip of a loop; of one that is gone through at once, in a step of all cores."""
        trip = sum(self.stretch_bytes(w, at) for w in self.moves)
        return trip * self.cores if self.loops[at].at_once else trip

    def stretch_bytes(self, window: Window, at: int) -> int:
        """Bytes of a window in one trip of a loop."""
        inner = [] if self.loops[at].at_once else self.loops[at + 1 :]
        return _bytes(window) * math.prod(x.trips for x in inner if x.axis in self.moves[window])


def _bytes(window: Window) -> int:
    return window.tile.elems * window.tile.dtype.bytes


def _times(loops: Sequence[_Loop], kernel: Kernel) -> int:
    """Trips of some loops in all; the last group of an axis may be a smaller one."""
    trips: dict[int, int] = {}
    for loop in loops:
        trips[loop.axis] = min(trips.get(loop.axis, 1) * loop.trips, kernel.grid[loop.axis].size)
    return math.prod(trips.values())


def _loops(kernel: Kernel, at_once: Mapping[int, int]) -> list[_Loop]:
    """The grid's axes in order, and in every step of theirs the points that cores are at."""
    outer = [_Loop(a, -(-g.size // at_once.get(a, 1))) for a, g in enumerate(kernel.grid)]
    return [*outer, *(_Loop(a, trips, at_once=True) for a, trips in at_once.items())]


def _at_once(kernel: Kernel, cores: int, read: Moves) -> Mapping[int, int]:
    """Trips of the axes of points that so many cores are at together: of the last two a rectangle, of others all if they can be."""
    axes = [a for a in kernel.parallel if kernel.grid[a].size > 1]
    found = min(_rectangles(kernel, axes[-2:], cores), key=lambda sides: _bytes_read(sides, read))
    for a in reversed(axes[:-2]):
        left, size = cores // math.prod(found.values()), kernel.grid[a].size
        if size > left or any(n < kernel.grid[x].size for x, n in found.items()):
            break
        found = {a: size, **found}
    return found


def _rectangles(kernel: Kernel, axes: Sequence[int], cores: int) -> Iterator[Mapping[int, int]]:
    """The rectangles of at most so many points along at most two axes."""
    if not axes:
        yield {}
        return
    *outer, last = axes
    for n in range(1, min(cores, kernel.grid[last].size) + 1):
        yield {a: min(cores // n, kernel.grid[a].size) for a in outer} | {last: n}


def _bytes_read(sides: Mapping[int, int], read: Moves) -> float:
    """Bytes that a core reads in a step, those shared with others in equal parts."""
    return sum(_bytes(w) / math.prod(n for a, n in sides.items() if a not in moved) for w, moved in read.items())
