"""What the lift rules work on: virtual tensors, the state of a kernel that is being translated, and what is known about it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from jax import lax

from tpuflow.device.fast import access
from tpuflow.device.fast.arithmetic import LaxArithmetic
from tpuflow.device.fast.boxes import Inside, Margins
from tpuflow.device.fast.halos import Halos
from tpuflow.device.fast.joined_stores import Piece, coalesced
from tpuflow.isa import dma
from tpuflow.isa.instruction import Tile, Window
from tpuflow.isa.program import Buffer, Kernel

Chips = Callable[[Any], Any]
"""What a chip has -> what each of a group of chips has, side by side: [...] -> [chips, ...]."""


def view_axes(window: Window) -> tuple[tuple[int, int, int], ...]:
    """Extent, pitch and dilation of every axis."""
    return tuple((a.extent, a.pitch, a.dilation) for a in window.axes)


def same_view(window: Window) -> tuple[Any, ...]:
    """Equal for windows that see one buffer alike, wherever they stand in it."""
    return window.buffer, repr(window.fill), view_axes(window)


@dataclass(frozen=True)
class Virtual:
    """A tile's content over all lifted trips: leading dimensions for the lifted grid axes in `batch`, then the tile's own axes.

    `inside`: the same without its padding, for those that can do without it. `rested`: the same as it lies between launches. `work`: the
    elementwise instructions on the way from what was loaded, summed, multiplied or moved, by `id`, each with the work that it is.
    """

    array: Any
    batch: tuple[int, ...] = ()
    inside: Inside | None = None
    rested: Any = None
    work: frozenset[tuple[int, int]] = frozenset()


@dataclass
class State:
    """What a kernel changes while it is translated: buffers (storage form) and tiles (the arithmetic's form)."""

    hbm: dict[int, Any]
    tiles: dict[Tile, Virtual] = field(default_factory=dict)
    pieces: dict[int, list[tuple[Window, Piece]]] = field(default_factory=dict)
    padded: dict[Any, tuple[Any, Any]] = field(default_factory=dict)  # what a padded view was made of, and the view
    margins: dict[Any, Margins] = field(default_factory=dict)  # by how much the loads of a view leave it

    def put_down(self, buffers: Sequence[Buffer]) -> None:
        """Write the pieces that wait for others."""
        for b, waiting in self.pieces.items():
            window = waiting[0][0]
            view = access.to_view(self.hbm[b], window)
            for piece in coalesced([piece for _, piece in waiting]):
                view = access.write_axes(view, piece.array, window, piece.positions)
            self.hbm[b] = access.from_view(view, window, buffers[b].shape)
        self.pieces = {}


@dataclass
class Lifting:
    """What a lift rule knows: kernel, buffer table, arithmetic, which grid axes are loops, which buffers other kernels read what it
    writes of, what has the factors of all chips whose products are added up (None: a chip's are its own), whether all steps are taken at
    once, and which tiles are carried from step to step."""

    kernel: Kernel
    buffers: Sequence[Buffer]
    ar: LaxArithmetic
    looped: frozenset[int]
    read_on: Set[int] = frozenset()
    chips: Chips | None = None
    folded: bool = False
    halos: Halos = field(default_factory=dict)
    carried: frozenset[Tile] = frozenset()

    @functools.cached_property
    def loads(self) -> Mapping[tuple[Any, ...], list[Window]]:
        """The windows of all loads, by what they see alike."""
        found: dict[tuple[Any, ...], list[Window]] = {}
        for i in self.kernel.instructions:
            if isinstance(i, dma.Load):
                found.setdefault(same_view(i.window), []).append(i.window)
        return found

    @functools.cached_property
    def together(self) -> frozenset[int]:
        """Buffers that several stores write through one view."""
        views: dict[int, list[Any]] = {}
        for i in self.kernel.instructions:
            if isinstance(i, dma.Store):
                views.setdefault(i.window.buffer, []).append(view_axes(i.window))
        return frozenset(b for b, found in views.items() if len(found) > 1 and len(set(found)) == 1)

    @functools.cached_property
    def only_stored(self) -> frozenset[Tile]:
        """Tiles that stores alone read."""
        stores = {i.window.tile for i in self.kernel.instructions if isinstance(i, dma.Store)}
        return frozenset(stores.difference(*(i.reads() for i in self.kernel.instructions if not isinstance(i, dma.Store))))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Trips of every grid axis."""
        return tuple(g.size for g in self.kernel.grid)

    def read(self, tile: Tile, state: State) -> Virtual:
        """The current content of a tile (the verifier has shown that there is one)."""
        return state.tiles[tile]

    def aligned(self, values: Sequence[Virtual]) -> tuple[list[Any], tuple[int, ...]]:
        """The arrays brought to one common set of batch dimensions."""
        batch = tuple(sorted({g for v in values for g in v.batch}))
        return [self.expand(v, batch) for v in values], batch

    def expand(self, value: Virtual, batch: tuple[int, ...]) -> Any:
        if value.batch == batch:
            return value.array
        rank = value.array.ndim - len(value.batch)
        shape = tuple(self.sizes[g] for g in batch) + value.array.shape[len(value.batch) :]
        where = [batch.index(g) for g in value.batch] + [len(batch) + i for i in range(rank)]
        return lax.broadcast_in_dim(value.array, shape, where)

    def lifted(self, axis_grid: int) -> bool:
        """Whether a grid axis is lifted (not looped)."""
        return axis_grid >= 0 and axis_grid not in self.looped
