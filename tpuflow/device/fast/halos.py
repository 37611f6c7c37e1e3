"""Halo tiles lifted: which tiles hold the overlapping pieces of one axis that a convolution addresses by two labels, or windows by slices.

Over the lifted grid such a tile is the one stretch of positions that all its trips reach, not a stack of overlapping pieces. That is
right where nothing but the loads, elementwise work and the products or slices themselves touch the tile, all in the body: or in the
prologue too, where the sequential axes, which stand still there, do not move the tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpuflow.isa import dma
from tpuflow.isa.contraction import Halo
from tpuflow.isa.instruction import Instruction, Tile
from tpuflow.isa.matrix import MatmulAccumulate
from tpuflow.isa.program import Kernel
from tpuflow.isa.vector import Slice

Halos = Mapping[Tile, Mapping[int, Halo]]
"""The halos of every halo tile, by axis."""


def halos_of(kernel: Kernel) -> Halos | None:
    """The halos of a kernel; None if some halo tile is not only loaded, worked on by elements, and multiplied or sliced."""
    found: dict[Tile, Mapping[int, Halo]] = {i.a: i.halos for i in kernel.body if isinstance(i, MatmulAccumulate | Slice) and i.halos}
    if not found:
        return found
    before = [*kernel.prologue, *kernel.body]
    made = {t: i for i in before for t in i.writes()}
    pending = list(found)
    while pending:
        tile = pending.pop()
        maker = made.get(tile)
        if maker is not None and maker.has("elementwise"):
            fresh = [t for t in maker.reads() if t not in found]
            found.update(dict.fromkeys(fresh, found[tile]))
            pending += fresh
    early, late = ({t for i in part for t in (*i.reads(), *i.writes())} & found.keys() for part in (kernel.prologue, kernel.epilogue))
    moved = any(g in kernel.sequential for t in early for halo in found[t].values() for g, _ in halo.moves)
    return None if late or moved or not all(_keeps(i, found) for i in before) else found


def _keeps(i: Instruction, found: Halos) -> bool:
    """Whether an instruction treats halo tiles so that the pieces stay pieces of one stretch."""
    touched = [t for t in (*i.reads(), *i.writes()) if t in found]
    if not touched:
        return True
    halos = found[touched[0]]
    if isinstance(i, MatmulAccumulate):
        return i.b not in found and i.acc not in found and found[i.a] == i.halos
    if isinstance(i, Slice):
        return i.dst not in found and found[i.a] == i.halos
    if isinstance(i, dma.Load):
        return all(halo.fits(i.window.axes[n]) for n, halo in halos.items())
    every: tuple[Any, ...] = (*i.reads(), *i.writes())
    return i.has("elementwise") and all(found.get(t) == halos for t in every)
