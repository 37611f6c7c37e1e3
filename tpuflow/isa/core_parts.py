"""Several cores: which points of a kernel each of them runs, and which part of an array that stays in VMEM each of them has.

Core c of C runs the points [c P / C, (c + 1) P / C) of a kernel's P, where the kernel touches arrays that stay, and has the elements
[c N / C, (c + 1) N / C) of an array's N. None reads or writes the VMEM of another.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from tpuflow.isa.instruction import Window
from tpuflow.isa.program import Kernel

Numbers = TypeVar("Numbers", int, np.ndarray)


def core_of(number: Numbers, count: int, cores: int) -> Numbers:
    """The core that has number `number` of `count` points, or elements; or the cores of several."""
    return number * cores // count


def strays(kernel: Kernel, window: Window, elems: int, cores: int) -> str:
    """Why the points of one core may touch what another core has of a window's array of `elems` elements; empty if they do not.

    They do not if the outermost axis that the kernel cuts into points divides by the cores, and each of its trips moves the window by
    its share of the array's outermost axis.
    """
    if cores == 1 or not elems:
        return ""
    outer = next((g for g in kernel.parallel if kernel.grid[g].size > 1), None)
    if outer is None or kernel.grid[outer].size % cores:
        trips = 1 if outer is None else kernel.grid[outer].size
        return f"its outermost parallel axis has {trips} trips; expected a multiple of the {cores} cores"
    for axis, tile in zip(window.axes, window.tile.axes, strict=True):
        moves = len(axis.grid) == 1 and axis.grid[0][0] == outer and axis.grid[0][1] * kernel.grid[outer].size == axis.extent
        plain = (axis.origin, axis.step, axis.dilation, axis.register) == (0, 1, 1, None)
        if moves and plain and axis.extent * axis.pitch == elems and tile.size <= axis.grid[0][1]:
            return ""
    return f"grid axis {outer} does not cut the array's outermost axis into equal parts; expected each core to keep to its own"
