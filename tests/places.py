"""Which element of a buffer every tile element is, position by position: the definition of windows, for short ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tpuflow.isa.instruction import Window, WindowAxis
from tpuflow.isa.windows import base_position


def axis_positions(axis: WindowAxis, length: int, base: int) -> tuple[np.ndarray, np.ndarray]:
    """(element of the view axis, whether it exists) for tile elements 0 ... length - 1, the first sitting at position `base`.

    Both are [length]; where nothing exists the element is meaningless.
    """
    position = base + axis.step * np.arange(length, dtype=np.int64)
    element = position // axis.dilation
    return element, (element * axis.dilation == position) & (element >= 0) & (element < axis.extent)


def tile_positions(window: Window, index: Sequence[int], registers: Sequence[int] = ()) -> list[tuple[np.ndarray, np.ndarray]]:
    """`axis_positions` of every axis at grid index `index`; tile axes have their valid lengths.

    registers: one value for every axis that has a register, in axis order.
    """
    values = iter(registers)
    found = []
    for axis, tile in zip(window.axes, window.tile.axes, strict=True):
        register = 0 if axis.register is None else next(values)
        length = tile.valid(index[tile.grid] if tile.grid >= 0 else 0)
        found.append(axis_positions(axis, length, base_position(axis, index, register)))
    return found
