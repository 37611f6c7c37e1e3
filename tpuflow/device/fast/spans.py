"""Halo tiles lifted: which tiles hold the overlapping pieces of one axis that a convolution addresses by two labels.

Over the lifted grid such a tile is the one stretch of positions that all its trips reach, not a stack of overlapping pieces. That is
right where nothing but the loads, elementwise work and the product itself touches the tile, all in the body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpuflow.isa import dma
from tpuflow.isa.instruction import Instruction, Pair, Tile, TileAxis, WindowAxis
from tpuflow.isa.matrix import MatmulAccumulate
from tpuflow.isa.program import Kernel


@dataclass(frozen=True, slots=True)
class Span:
    """An axis addressed by two labels, whose tile axes are `outer` and `inner`."""

    pair: Pair
    outer: TileAxis
    inner: TileAxis

    def moves(self) -> dict[int, int]:
        """Positions by which the two labels' grid axes move the tile."""
        moves = ((self.outer.grid, self.outer.size * self.pair.stride), (self.inner.grid, self.inner.size * self.pair.dilation))
        return {g: elements for g, elements in moves if g >= 0}

    def fits(self, axis: WindowAxis) -> bool:
        """Whether a window axis moves as the labels do and in no other way."""
        return dict(axis.grid) == self.moves() and axis.step == 1 and axis.register is None


Spans = Mapping[Tile, Mapping[int, Span]]


def spans_of(kernel: Kernel) -> Spans | None:
    """The spans of every halo tile by axis; None if some halo tile is not only loaded, worked on by elements and multiplied."""
    found: dict[Tile, Mapping[int, Span]] = {}
    for i in kernel.body:
        if isinstance(i, MatmulAccumulate) and i.pairs:
            found[i.a] = _spans(i)
    if not found:
        return found
    made = {t: i for i in kernel.body for t in i.writes()}
    pending = list(found)
    while pending:
        tile = pending.pop()
        maker = made.get(tile)
        if maker is not None and maker.has("elementwise"):
            fresh = [t for t in maker.reads() if t not in found]
            found.update(dict.fromkeys(fresh, found[tile]))
            pending += fresh
    outside = (*kernel.prologue, *kernel.epilogue)
    touched = any(t in found for i in outside for t in (*i.reads(), *i.writes()))
    return None if touched or not all(_keeps(i, found) for i in kernel.body) else found


def _spans(i: MatmulAccumulate) -> dict[int, Span]:
    axis_of = dict(zip(i.b_axes + i.acc_axes, i.b.axes + i.acc.axes, strict=True))
    return {p.axis: Span(p, axis_of[i.a_axes[p.axis]], axis_of[p.label]) for p in i.pairs}


def _keeps(i: Instruction, found: Spans) -> bool:
    """Whether an instruction treats halo tiles so that the pieces stay pieces of one stretch."""
    touched = [t for t in (*i.reads(), *i.writes()) if t in found]
    if not touched:
        return True
    spans = found[touched[0]]
    if isinstance(i, MatmulAccumulate):
        return i.b not in found and i.acc not in found and found[i.a] == _spans(i)
    if isinstance(i, dma.Load):
        return all(span.fits(i.window.axes[n]) for n, span in spans.items())
    every: tuple[Any, ...] = (*i.reads(), *i.writes())
    return i.has("elementwise") and all(found.get(t) == spans for t in every)
