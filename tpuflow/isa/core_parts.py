"""Several cores: which trips of a kernel each core runs, and which part of a VMEM-resident array it holds.

A resident array of N elements is divided over the C cores: core c holds the elements [c N / C, (c + 1) N / C) in its own VMEM, and no core
reads or writes the VMEM of another. A kernel that uses resident arrays is divided alike: core c runs the points [c P / C, (c + 1) P / C) of
its P, or, if it has a single point whose steps only accumulate (`core_shares`), the steps [c S / C, (c + 1) S / C) of its S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tpuflow.isa.core_shares import can_split_steps
from tpuflow.isa.instruction import Window
from tpuflow.isa.loop_nest import Iteration, LoopNest
from tpuflow.isa.program import Kernel

Numbers = TypeVar("Numbers", int, np.ndarray)


def core_of(number: Numbers, count: int, cores: int) -> Numbers:
    """The core that runs trip `number` of `count`, or holds that element; `number` may be an array of them."""
    return number * cores // count


@dataclass(frozen=True, slots=True)
class CoreParts:
    """How `cores` divide a kernel that uses resident arrays: by points, or `by_steps`. `outer` is the outermost grid axis that they
    divide (None: there is only one trip)."""

    kernel: Kernel
    cores: int
    by_steps: bool
    outer: int | None

    @classmethod
    def of(cls, kernel: Kernel, cores: int) -> CoreParts:
        """The division of a kernel."""
        by_steps = cores > 1 and LoopNest(kernel.grid).points == 1 and can_split_steps(kernel)
        axes = kernel.sequential if by_steps else kernel.parallel
        return cls(kernel, cores, by_steps, next((g for g in axes if kernel.grid[g].size > 1), None))

    def core(self, at: Iteration) -> int:
        """The core that runs a section at this place of the grid."""
        nest = LoopNest(self.kernel.grid)
        return core_of(at.step, nest.steps, self.cores) if self.by_steps else core_of(at.point, nest.points, self.cores)

    def strays(self, window: Window, elems: int) -> str:
        """Why a core may access another core's part of the resident array (of `elems` elements) of a window; empty if none does.

        None does if `outer` has a multiple of `cores` trips, each of which moves the window by an equal share of the array's outermost
        axis. If cores divide steps, the window must be in the body: a single core runs the prologue and the epilogue.
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
        """Whether window axis `number` is the array's outermost, and the trips of `outer` divide it into equal shares."""
        axis, tile = window.axes[number], window.tile.axes[number]
        plain = (axis.origin, axis.step, axis.dilation, axis.register) == (0, 1, 1, None)
        if len(axis.grid) != 1 or not plain or axis.extent * axis.pitch != elems:
            return False
        grid, stride = axis.grid[0]
        return grid == self.outer and stride * self.kernel.grid[grid].size == axis.extent and tile.size <= stride
