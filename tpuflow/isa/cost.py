"""The cost of one execution of an instruction: cycles of its unit, bytes moved and operations done."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tpuflow.isa.instruction import Tile, Window

ShapeOf = Callable[[Tile], tuple[int, ...]]
"""The valid shape of a tile at the grid index that is being priced."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One execution on one core.

    `cycles` is how long the unit is busy, without data transfers; for `generator_cycles` the core's random generator is, beside it, until
    the last word is there. `hbm_bytes` are the bytes of buffers that a transfer reads or writes,
    `bus_bytes` the same in whole bursts, which is what the memory moves; of a buffer that stays on the chip, `resident_bytes` are these
    instead. `macs` are multiply-adds of the matrix unit, `element_ops` results of the vector or scalar unit.
    """

    cycles: int = 0
    hbm_bytes: int = 0
    bus_bytes: int = 0
    macs: int = 0
    element_ops: int = 0
    resident_bytes: int = 0
    generator_cycles: int = 0

    def within_chip(self) -> Cost:
        """The cost of the same transfer if the buffer stays on the chip."""
        return replace(self, hbm_bytes=0, bus_bytes=0, resident_bytes=self.bus_bytes)


def window_bytes(window: Window, shape: Sequence[int], burst_bytes: int) -> tuple[int, int]:
    """(bytes of the buffer that a tile of valid `shape` touches, the same in whole bursts).

    Positions between the elements of a dilated view, and those that can only lie outside it, are filled and not moved; a stretched
    axis (step 0, or an extent of 1) is moved once.
    """
    size = window.tile.dtype.bytes
    counts = [_touched(n, axis.extent, axis.step, axis.dilation) for n, axis in zip(shape, window.axes, strict=True)]
    elems = math.prod(counts)
    run = 1
    for count, axis in sorted(zip(counts, window.axes, strict=True), key=lambda pair: pair[1].pitch):
        if axis.extent == 1 or count == 0:
            continue
        if axis.pitch != run or abs(axis.step) != axis.dilation:
            break
        run *= count
        if count < axis.extent:
            break
    runs = elems // run
    return elems * size, runs * -(-run * size // burst_bytes) * burst_bytes


def _touched(length: int, extent: int, step: int, dilation: int) -> int:
    if step == 0:
        return min(length, 1)
    reach = (length - 1) * abs(step) // dilation + 1 if abs(step) < dilation else length
    return max(0, min(length, reach, extent))
