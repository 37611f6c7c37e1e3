"""What a chip's shared cache saves: how often a kernel reads again what it read shortly before.

A window that does not move along a grid axis reads the same data on every trip of it. Where all that the kernel moves in one trip fits
in the cache, the later trips read it there. Cores take neighbouring points in turn and step through them side by side, so that the
cache sees the points that are at work at once in every step, and else the grid in its order.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tpuflow.chips.chip import Chip
from tpuflow.isa.core_shares import share
from tpuflow.isa.instruction import Window
from tpuflow.isa.program import Kernel


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
    again = {w: axes for w, axes in trips.again(chip).items() if axes}
    times = {w: math.prod(trips.sizes[a] for a in axes) for w, axes in again.items()}
    return Reuse(times, sum(trips.stretch_bytes(w, min(axes, key=trips.order.index)) for w, axes in again.items()))


@dataclass(frozen=True, slots=True)
class _Trips:
    """The windows of a kernel's arrays with their roles, the grid axes that `moves` each of them, and the axes from the slowest on; those
    that are gone through `together`, in a step of all `cores`, come last."""

    windows: Mapping[Window, str]
    moves: Mapping[Window, Collection[int]]
    sizes: Sequence[int]
    order: Sequence[int]
    together: Collection[int]
    cores: int

    @classmethod
    def of(cls, kernel: Kernel, chip: Chip) -> _Trips:
        """Look at a kernel on a chip."""
        windows = {w: role for i in kernel.instructions for role, w in i.windows() if w.tile.axes}
        moves = {w: frozenset(g for axis in w.axes for g, _ in axis.grid) for w in windows}
        division, _ = share(kernel, chip)
        together = _together(kernel, division.cores // division.share)
        order = [*(a for a in range(len(kernel.grid)) if a not in together), *together]
        return cls(windows, moves, [g.size for g in kernel.grid], order, together, division.cores)

    def again(self, chip: Chip) -> Mapping[Window, Collection[int]]:
        """Of every window that is read, the axes along whose trips the same data are read again from the cache."""
        kept = {axis for axis, size in enumerate(self.sizes) if size > 1 and self._trip_bytes(axis) <= chip.cache_bytes}
        return {w: kept - set(self.moves[w]) for w, role in self.windows.items() if role == "read"}

    def _trip_bytes(self, axis: int) -> int:
        """Bytes of all windows in one trip of a grid axis; of one that is gone through at once, in a step of all cores."""
        trip = sum(self.stretch_bytes(w, axis) for w in self.windows)
        return trip * self.cores if axis in self.together else trip

    def stretch_bytes(self, window: Window, axis: int) -> int:
        """Bytes of a window in one trip of a grid axis."""
        inner = [] if axis in self.together else self.order[self.order.index(axis) + 1 :]
        return window.tile.elems * window.tile.dtype.bytes * math.prod(self.sizes[i] for i in inner if i in self.moves[window])


def _together(kernel: Kernel, points: int) -> Sequence[int]:
    """The last axes of the points whose trips are all at work at once, where so many points are."""
    axes: list[int] = []
    for axis in reversed(kernel.parallel):
        points //= kernel.grid[axis].size
        if not points:
            break
        axes.insert(0, axis)
    return axes
