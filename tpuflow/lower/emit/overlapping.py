"""Windows of one array that overlap, as those of a pooling do: one halo tile is loaded for all of them, and each is a slice of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tpuflow.chips import Chip
from tpuflow.isa.contraction import Halo, SlidingAxis
from tpuflow.isa.instruction import TileAxis, Window
from tpuflow.isa.vector import Slice


@dataclass(frozen=True, slots=True)
class Overlapping:
    """What windows read together: `window` loads the halo tile, of which each takes elements in `strides`."""

    window: Window
    strides: tuple[int, ...]

    def slice(self, window: Window) -> Slice:
        """What one of the windows would load, taken from the halo tile."""
        pairs = zip(window.axes, self.window.axes, strict=True)
        return Slice(window.tile, self.window.tile, tuple(one.origin - first.origin for one, first in pairs), self.strides)


def overlapping(windows: Sequence[Window], chip: Chip) -> Overlapping | None:
    """What windows that differ in their origins alone read together, its tile without an address; None if their slices take the vector
    units more time than the loads that they spare.
    """
    first = windows[0]
    axes, walks, strides = list(first.tile.axes), list(first.axes), [1] * len(first.axes)
    for x, walk in enumerate(first.axes):
        origins = [one.axes[x].origin for one in windows]
        reach = max(origins) - min(origins)
        if not reach:
            continue
        if walk.step < 1 or walk.register is not None:
            return None
        halo = Halo(SlidingAxis(x, 0, walk.step, 1), first.tile.axes[x], TileAxis(reach + 1))
        axes[x], strides[x] = halo.tile, walk.step
        walks[x] = replace(walk, origin=min(origins), grid=halo.moves, step=1)
    tile = replace(first.tile, axes=tuple(axes))
    found = Overlapping(replace(first, tile=tile, axes=tuple(walks)), tuple(strides))
    return found if _spared_seconds(found, windows, chip) > 0 else None


def _spared_seconds(found: Overlapping, windows: Sequence[Window], chip: Chip) -> float:
    """By how much the loads of the windows by themselves take longer than the load of all that they read and their slices."""
    first, halo = windows[0].tile, found.window.tile
    spared_bytes = (len(windows) * first.elems - halo.elems) * first.dtype.bytes
    cycles = sum(found.slice(one).cost(chip, lambda tile: tile.shape).cycles for one in windows)
    return spared_bytes / chip.core_bandwidth(chip.cores) - cycles / chip.clock_hz
