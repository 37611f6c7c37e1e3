"""Elementwise kernels in the shape of their buffers: the device walks over arrays as one stretch, XLA need not see that they lie so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tpuflow.isa import dma, vector
from tpuflow.isa.instruction import Instruction, Tile, TileAxis, Window
from tpuflow.isa.program import Buffer, Kernel
from tpuflow.isa.windows import plain_window


def covers(kernel: Kernel, window: Window) -> bool:
    """Whether a window walks over the whole buffer in order: every axis from 0 to its extent in tile steps."""
    for axis, tile in zip(window.axes, window.tile.axes, strict=True):
        grid = ((tile.grid, tile.size),) if tile.grid >= 0 and kernel.grid[tile.grid].size > 1 else ()
        moves = tuple((g, e) for g, e in axis.grid if kernel.grid[g].size > 1)
        plain = axis.origin == 0 and axis.step == 1 and axis.dilation == 1 and axis.register is None
        if not plain or moves != grid or tile.whole != axis.extent:
            return False
    return True


def in_shape_of_buffers(kernel: Kernel, buffers: Sequence[Buffer]) -> Kernel:
    """The same work without a grid on tiles of the buffers' shape, if the kernel is elementwise work on stretches that are whole buffers of
    one shape; else the kernel.

    Where a result is read by the rest of the kernel as a stretch and kept in another shape, XLA makes it twice and copies a state that it
    could update where it lies.
    """
    windows = [w for i in kernel.instructions for _, w in i.windows()]
    shapes = {buffers[w.buffer].shape for w in windows if w.axes}
    if len(shapes) != 1 or len(next(iter(shapes))) < 2 or not all(map(_works_elementwise, kernel.instructions)):
        return kernel
    tiles = {t for i in kernel.instructions for t in (*i.reads(), *i.writes())}
    if any(len(t.axes) > 1 for t in tiles) or not all(covers(kernel, w) for w in windows):
        return kernel
    (shape,) = shapes
    axes = tuple(TileAxis(n) for n in shape)

    def tile(t: Tile) -> Tile:
        return replace(t, axes=axes) if t.axes else t

    def window(w: Window) -> Window:
        return replace(plain_window(w.buffer, shape, tile(w.tile)), fill=w.fill) if w.axes else w

    def value(kind: str, old: Any) -> Any:
        if kind == "tiles":
            return tuple(map(tile, old))
        return tile(old) if kind == "tile" else window(old)

    def one(i: Instruction) -> Instruction:
        found = {name: value(kind.name, old) for name, kind, old in i.fields() if kind.name in ("tile", "tiles", "window")}
        return replace(i, **found)  # pyright: ignore[reportArgumentType] every instruction is a dataclass

    sections = {name: tuple(map(one, section)) for name, section in kernel.sections}
    return replace(kernel, grid=(), **sections)


def _works_elementwise(i: Instruction) -> bool:
    """Whether an instruction means the same in any shape of its tiles."""
    if isinstance(i, (dma.Load, dma.Store, vector.Constant, dma.Signal, dma.Wait)):
        return True
    return i.has("elementwise") or (isinstance(i, vector.Broadcast) and not i.a.axes)
