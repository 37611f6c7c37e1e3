"""Index arithmetic of windows: the view of a buffer, and which element of it every tile element is.

Pure functions of a window and plain integers; the verifier, the reference engine and tests share them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tpuflow.isa.instruction import Tile, TileAxis, Window, WindowAxis


@dataclass(frozen=True, slots=True)
class View:
    """A dense buffer seen through a window: `buffer.reshape(dims).transpose(permutation)` has the window's axes in order."""

    dims: tuple[int, ...]
    permutation: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """Whether the axes are in the buffer's own order."""
        return self.permutation == tuple(range(len(self.permutation)))


def view_problem(window: Window, elems: int) -> str:
    """Why the window's axes are not a permuted dense view of a buffer of `elems` elements; empty if they are.

    Axes of extent 1 may have any pitch, and a view of no elements any pitches at all: neither ever uses them.
    """
    extents = [a.extent for a in window.axes]
    if math.prod(extents) != elems:
        return f"view extents {extents} hold {math.prod(extents)} elements, the buffer {elems}"
    if elems == 0:
        return ""
    inner = 1
    for axis in sorted((a for a in window.axes if a.extent != 1), key=lambda a: a.pitch):
        if axis.pitch != inner:
            return f"view extents {extents} with pitches {[a.pitch for a in window.axes]} are not row-major in any order"
        inner *= axis.extent
    return ""


def view_layout(window: Window) -> View:
    """The reshape and permutation that make a dense buffer the window's view (`view_problem` must be empty)."""
    order = sorted(range(len(window.axes)), key=lambda i: (-window.axes[i].pitch, window.axes[i].extent != 1, i))
    return View(tuple(window.axes[i].extent for i in order), tuple(order.index(i) for i in range(len(order))))


def base_position(axis: WindowAxis, index: Sequence[int], register: int = 0) -> int:
    """Position of tile element 0 at grid index `index` (all grid axes), before dilation."""
    return axis.origin + register + sum(elements * index[g] for g, elements in axis.grid)


def present(axis: WindowAxis, length: int, base: int) -> tuple[range, range]:
    """The in-bounds part of a tile axis of `length` elements, of which element 0 is at position `base`, as two ranges: (the tile elements
    that are elements of the view, those elements of the view axis).

    Along an axis of step 0 all tile elements are the same element of the view.
    """
    if axis.step == 0:
        element, rest = divmod(base, axis.dilation)
        here = rest == 0 and 0 <= element < axis.extent
        return range(length if here else 0), range(element, element + (here and length > 0))
    common = math.gcd(axis.step, axis.dilation)
    if base % common:
        return range(0), range(0)
    period = axis.dilation // common  # of tile elements at a multiple of the dilation
    first = -(base // common) * pow(axis.step // common, -1, period) % period
    element, step = (base + axis.step * first) // axis.dilation, axis.step // common
    near, far = (0, axis.extent - 1) if step > 0 else (axis.extent - 1, 0)
    skipped = max(0, -((element - near) // step))
    count = min(len(range(first, length, period)), (far - element) // step + 1) - skipped
    count = max(0, count)
    first, element = first + skipped * period, element + skipped * step
    return range(first, first + count * period, period), range(element, element + count * step, step)


def plain_axis(extent: int, pitch: int, tile: TileAxis) -> WindowAxis:
    """The window axis of a tile axis over a whole view axis: block i of the grid at position i * size, without stride or dilation."""
    grid = ((tile.grid, tile.size),) if tile.grid >= 0 else ()
    return WindowAxis(extent, pitch, grid=grid)


def plain_window(buffer: int, shape: Sequence[int], tile: Tile) -> Window:
    """The window of a tile whose axes are, in order, the (blocked or whole) axes of a row-major buffer of `shape`."""
    pitches = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return Window(buffer, tile, tuple(map(plain_axis, shape, pitches, tile.axes)))
