"""The loop nest of a kernel: logical axes are merged where all operands traverse them alike, cut into tiles, and windows give the DMAs.

Logical axes carry labels (integers). An operand is described by the labels of its axes; None marks an axis of size 1 that is
broadcast. Axes of size 1 are dropped; two axes that are adjacent in every operand that has either of them are merged.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpuflow.dtypes import DType
from tpuflow.isa.bounds import Bound
from tpuflow.isa.instruction import Tile, TileAxis, Window, WindowAxis
from tpuflow.isa.program import GridAxis
from tpuflow.lower.graph.accesses import AccessAxis
from tpuflow.lower.graph.tiling import Space, Tiling

Labels = Sequence[int | None]


@dataclass(frozen=True, slots=True)
class Unit:
    """An axis of size 1 that a tile has and no array; `name` distinguishes those of one kernel."""

    name: str


Axis = int | Unit
"""The number of a merged axis, or an axis of size 1 that no array has."""


@dataclass(frozen=True, slots=True)
class Merged:
    """Axes after merging: their sizes, and the merged axis of every label that did not vanish."""

    sizes: tuple[int, ...]
    axis_of: Mapping[int, int]

    def fold(self, labels: Labels) -> tuple[int, ...]:
        """The merged axes of an operand, in its own order."""
        return tuple(dict.fromkeys(self.axis_of[x] for x in labels if x is not None and x in self.axis_of))


def merge(sizes: Mapping[int, int], operands: Iterable[Labels]) -> Merged:
    """Merge the axes `sizes` (label -> length), numbered in the order of `sizes`, given the labels of every operand."""
    used = [[x for x in labels if x is not None and sizes[x] != 1] for labels in operands]
    follows = {x: y for labels in used for x, y in itertools.pairwise(labels)}
    glued = {x: y for x, y in follows.items() if all(_adjacent(x, y, labels) for labels in used)}
    heads = [x for x in sizes if sizes[x] != 1 and x not in glued.values()]
    axis_of: dict[int, int] = {}
    lengths = []
    for axis, label in enumerate(heads):
        length, last = sizes[label], label
        axis_of[label] = axis
        while last in glued:
            last = glued[last]
            axis_of[last] = axis
            length *= sizes[last]
        lengths.append(length)
    return Merged(tuple(lengths), axis_of)


def _adjacent(x: int, y: int, labels: Sequence[int]) -> bool:
    if x in labels and y in labels:
        return labels.index(y) == labels.index(x) + 1
    return x not in labels and y not in labels


@dataclass(frozen=True, slots=True)
class Nest:
    """Axes cut into tiles: the tile axis of each, and the grid of those that need more than one tile.

    walks: axes that do not traverse their buffer axis in order, with their window axis (the pitch is set later). bounds: axes whose
    position is an affine function of other axes (halos).
    """

    sizes: tuple[int, ...]
    axes: tuple[TileAxis, ...]
    grid: tuple[GridAxis, ...]
    walks: Mapping[int, WindowAxis] = field(default_factory=dict)
    bounds: Mapping[int, Bound] = field(default_factory=dict)

    def axis(self, axis: Axis) -> TileAxis:
        """The tile axis of an axis."""
        return TileAxis(1) if isinstance(axis, Unit) else self.axes[axis]

    def walk(self, number: int, pitch: int) -> WindowAxis:
        """The window axis of an axis over a buffer axis with this pitch."""
        if number in self.walks:
            return replace(self.walks[number], pitch=pitch)
        return walk(self.axes[number], self.sizes[number], pitch)

    def accessed(self, window: Window, axes: Sequence[Axis], start: Mapping[Tile, int]) -> tuple[AccessAxis, ...]:
        """The access axes, major to minor, of a window with the given (merged) axes. start: register -> the buffer it was loaded from."""
        walked = [(w, a) for w, a in zip(window.axes, axes, strict=True) if not isinstance(a, Unit) and (w.extent, w.pitch) != (1, 1)]
        major = sorted(walked, key=lambda entry: -entry[0].pitch)
        return tuple(
            AccessAxis(
                self.bounds.get(a) or Bound(w.extent, ((a, w.step),) if w.step else (), w.origin, w.dilation),
                None if w.register is None else start[w.register],
            )
            for w, a in major
        )


def cut(sizes: Sequence[int], tile: Sequence[int], sequential: Iterable[int] = ()) -> Nest:
    """Cut every axis into tiles; `sequential` axes come last in the grid, in the order given, and run in order."""
    ordered = tuple(sequential)
    blocked = [i for i, (n, t) in enumerate(zip(sizes, tile, strict=True)) if t < n]
    order = [i for i in blocked if i not in ordered] + [i for i in ordered if i in blocked]
    axes = [TileAxis(n) for n in sizes]
    for number, i in enumerate(order):
        axes[i] = TileAxis(tile[i], number, sizes[i])
    grid = tuple(GridAxis(-(-sizes[i] // tile[i]), "sequential" if i in ordered else "parallel") for i in order)
    return Nest(tuple(sizes), tuple(axes), grid)


def cut_as(space: Space, tiling: Tiling) -> Nest:
    """A space cut as a tiling says.

    Raises:
      CompileError: the tiling is none of this space.
    """
    space.check(tiling)
    return cut(space.sizes, tiling.tile, space.sequential)


def pitches(sizes: Sequence[int]) -> tuple[int, ...]:
    """Distance in elements between neighbours along each axis of a dense row-major array."""
    result, pitch = [], 1
    for n in reversed(sizes):
        result.append(pitch)
        pitch *= n
    return tuple(reversed(result))


def walk(
    axis: TileAxis, extent: int, pitch: int, *, origin: int = 0, step: int = 1, dilation: int = 1, register: Tile | None = None
) -> WindowAxis:
    """The window axis along which a tile axis walks from `origin` in strides of `step`, tile after tile."""
    grid = ((axis.grid, step * axis.size),) if axis.grid >= 0 else ()
    return WindowAxis(extent, pitch, origin, grid, step, dilation, register)


def zero_fill(dtype: DType) -> int | bool:
    """The fill of a window that never leaves its buffer: zero."""
    return False if dtype.kind == "pred" else 0


def window(nest: Nest, buffer: int, order: Sequence[int], tile: Tile, axes: Sequence[Axis]) -> Window:
    """The window of a tile with (merged) axes `axes` onto a dense buffer with axes `order`."""
    pitch = dict(zip(order, pitches([nest.sizes[a] for a in order]), strict=True))
    walks = tuple(WindowAxis(1, 1) if isinstance(a, Unit) or a not in pitch else nest.walk(a, pitch[a]) for a in axes)
    return Window(buffer, tile, walks, zero_fill(tile.dtype))
