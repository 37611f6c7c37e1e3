"""What a chip's shared cache saves: how often a kernel reads again what it read shortly before.

A window that does not move along a grid axis reads the same data on every trip of it. Where all that the kernel moves in one trip fits
in the cache, the later trips read it there. Cores take neighbouring points in turn and step through them side by side, so that the
cache sees the points that are at work at once in every step, and else the grid in its order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tpuflow.chips.chip import Chip
from tpuflow.device.timing.cores import share
from tpuflow.isa.instruction import Window
from tpuflow.isa.program import Kernel


def reuse(kernel: Kernel, chip: Chip) -> Mapping[Window, int]:
    """For every window that is read again from the cache: how often the same data are read in all."""
    if not chip.cache_bytes:
        return {}
    windows = {w: role for i in kernel.instructions for role, w in i.windows() if w.tile.axes}
    moves = {w: frozenset(g for axis in w.axes for g, _ in axis.grid) for w in windows}
    sizes = [g.size for g in kernel.grid]
    division, _ = share(kernel, chip)
    together = _together(kernel, division.cores // division.share)
    order = [*(a for a in range(len(sizes)) if a not in together), *together]

    def trip_bytes(axis: int) -> int:
        """Bytes of all windows in one trip of a grid axis; of one that is gone through at once, in a step of all cores."""
        inner = [] if axis in together else order[order.index(axis) + 1 :]
        trip = sum(w.tile.elems * w.tile.dtype.bytes * math.prod(sizes[i] for i in inner if i in moves[w]) for w in windows)
        return trip * division.cores if axis in together else trip

    kept = {axis for axis, size in enumerate(sizes) if size > 1 and trip_bytes(axis) <= chip.cache_bytes}
    found = {w: math.prod(sizes[a] for a in kept - moves[w]) for w, role in windows.items() if role == "read"}
    return {w: times for w, times in found.items() if times > 1}


def _together(kernel: Kernel, points: int) -> Sequence[int]:
    """The last axes of the points whose trips are all at work at once, where so many points are."""
    axes: list[int] = []
    for axis in reversed(kernel.parallel):
        points //= kernel.grid[axis].size
        if not points:
            break
        axes.insert(0, axis)
    return axes
