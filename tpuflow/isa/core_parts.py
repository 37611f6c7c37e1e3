"""Several cores: which trips of a kernel each of them runs, and which part of an array that stays in VMEM each of them has.

Core c of C runs the points [c P / C, (c + 1) P / C) of a kernel's P, where the kernel touches arrays that stay; of a kernel of one point
whose steps can be worked out apart (`core_shares`), the steps [c S / C, (c + 1) S / C) of its S. It has the elements
[c N / C, (c + 1) N / C) of an array's N. None reads or writes the VMEM of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tpuflow.isa.core_shares import works_apart
from tpuflow.isa.instruction import Window
from tpuflow.isa.loop_nest import At, LoopNest
from tpuflow.isa.program import Kernel

Numbers = TypeVar("Numbers", int, np.ndarray)


def core_of(number: Numbers, count: int, cores: int) -> Numbers:
    """The core that has number `number` of `count` trips, or elements; or the cores of several."""
    return number * cores // count


@dataclass(frozen=True, slots=True)
class CoreParts:
    """How `cores` divide a kernel that touches arrays that stay: by points, or `by_steps`; `outer` is the slowest grid axis of these (None:
    there is but one trip)."""

    kernel: Kernel
    cores: int
    by_steps: bool
    outer: int | None

    @classmethod
    def of(cls, kernel: Kernel, cores: int) -> CoreParts:
        """Look at a kernel."""
        by_steps = cores > 1 and LoopNest(kernel.grid).points == 1 and works_apart(kernel)
        axes = kernel.sequential if by_steps else kernel.parallel
        return cls(kernel, cores, by_steps, next((g for g in axes if kernel.grid[g].size > 1), None))

    def core(self, at: At) -> int:
        """The core that runs a section there."""
        nest = LoopNest(self.kernel.grid)
        return core_of(at.step, nest.steps, self.cores) if self.by_steps else core_of(at.point, nest.points, self.cores)

    def strays(self, window: Window, elems: int) -> str:
        """Why one core may touch what another has of a window's array of `elems` elements; empty if none does.

        None does if the outermost axis that the cores divide has a multiple of their number of trips, and each of these moves the window
        by its share of the array's outermost axis. Where cores divide steps, that holds for the body alone: one core runs the rest.
        """
        if self.cores == 1 or not elems:
            return ""
        kind, trips = "sequential" if self.by_steps else "parallel", 1 if self.outer is None else self.kernel.grid[self.outer].size
        if trips % self.cores:
            return f"its outermost {kind} axis has {trips} trips; expected a multiple of the {self.cores} cores"
        if self.by_steps and any(window == w for i in (*self.kernel.prologue, *self.kernel.epilogue) for _, w in i.windows()):
            return "its cores divide the steps, and one of them alone runs prologue and epilogue; expected it in the body"
        if any(self._cuts(window, n, elems) for n in range(len(window.axes))):
            return ""
        return f"grid axis {self.outer} does not cut the array's outermost axis into equal parts; expected each core to keep to its own"

    def _cuts(self, window: Window, number: int, elems: int) -> bool:
        """Whether a window's axis is the array's outermost, of which every trip takes its share."""
        axis, tile = window.axes[number], window.tile.axes[number]
        plain = (axis.origin, axis.step, axis.dilation, axis.register) == (0, 1, 1, None)
        if len(axis.grid) != 1 or not plain or axis.extent * axis.pitch != elems:
            return False
        grid, stride = axis.grid[0]
        return grid == self.outer and stride * self.kernel.grid[grid].size == axis.extent and tile.size <= stride
