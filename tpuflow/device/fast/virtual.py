"""What the lift rules work on: virtual tensors, the state of the kernel being translated, and the facts about it that they need."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from jax import lax

from tpuflow.device.fast import access
from tpuflow.device.fast.arithmetic import LaxArithmetic
from tpuflow.device.fast.boxes import Margins, Unpadded
from tpuflow.device.fast.halos import Halos
from tpuflow.device.fast.joined_stores import Piece, coalesced
from tpuflow.device.fast.reshapes import reshaped
from tpuflow.device.fast.softmaxes import Role, softmaxes
from tpuflow.isa import dma
from tpuflow.isa.instruction import Instruction, Tile, Window
from tpuflow.isa.program import Buffer, Kernel

Gather = Callable[[Any], Any]
"""An all-gather over a group of chips: [...] -> [chips, ...]."""


def view_axes(window: Window) -> tuple[tuple[int, int, int], ...]:
    """Extent, pitch and dilation of every axis."""
    return tuple((a.extent, a.pitch, a.dilation) for a in window.axes)


def same_view(window: Window) -> tuple[Any, ...]:
    """A key that is equal for windows that view one buffer alike, at whatever positions."""
    return window.buffer, repr(window.fill), view_axes(window)


def leading_ones(shape: Sequence[int]) -> int:
    """How many axes of one element come first, before the last axis."""
    return next((n for n, size in enumerate(shape[:-1]) if size != 1), max(0, len(shape) - 1))


@dataclass(frozen=True)
class Virtual:
    """A tile's content over all lifted trips: leading dimensions for the lifted grid axes in `batch`, then the tile's own axes.

    `inner`: the content, of which `front` axes of one element are left out, the first ones: XLA compiles what differs in nothing else once.
    `unpadded`: the content before padding, for rules that pad themselves. `rested`: the content at rest (see `LaxArithmetic`). `work`: the
    elementwise instructions that made it out of loads, sums, products and moves, as pairs of `id` and work (`lift.MATERIALIZE_WORK`).
    `zero`: it is +0 everywhere.
    """

    inner: Any
    batch: tuple[int, ...] = ()
    unpadded: Unpadded | None = None
    rested: Any = None
    work: frozenset[tuple[int, int]] = frozenset()
    zero: bool = False
    front: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the content."""
        return (1,) * self.front + self.inner.shape

    @functools.cached_property
    def array(self) -> Any:
        """The content."""
        return reshaped(self.inner, self.shape) if self.front else self.inner

    @functools.cached_property
    def ones(self) -> int:
        """How many axes of one element come first (`leading_ones`)."""
        return leading_ones(self.shape)

    @functools.cached_property
    def bare(self) -> Any:
        """The content without its first `ones` axes."""
        return self.inner if self.ones == self.front else reshaped(self.inner, self.shape[self.ones :])


@dataclass
class State:
    """The state of a kernel while it is translated: buffers (as `LaxArithmetic.hold` gives them) and tiles (carriers)."""

    hbm: dict[int, Any]
    tiles: dict[Tile, Virtual] = field(default_factory=dict)
    pieces: dict[int, list[tuple[Window, Piece]]] = field(default_factory=dict)
    padded: dict[Any, tuple[Any, Any]] = field(default_factory=dict)  # what a padded view was made of, and the view
    margins: dict[Any, Margins] = field(default_factory=dict)  # by how much the loads of a view leave it

    def write_pieces(self, buffers: Sequence[Buffer]) -> None:
        """Write the stores that were deferred, joined where they complete each other."""
        for b, waiting in self.pieces.items():
            window = waiting[0][0]
            view = access.to_view(self.hbm[b], window)
            for piece in coalesced([piece for _, piece in waiting]):
                view = access.write_axes(view, piece.array, window, piece.positions)
            self.hbm[b] = access.from_view(view, window, buffers[b].shape)
        self.pieces = {}


def _last_writer(instructions: Sequence[Instruction], tile: Tile) -> Instruction | None:
    return next((i for i in reversed(instructions) if tile in i.writes()), None)


@dataclass
class Lifting:
    """What a lift rule knows of the kernel.

    looped: grid axes that run as loops; the others are lifted. read_later: buffers whose content, as this kernel writes it, other blocks
    read. gather: of a product whose results are only summed over chips, all-gathers its operands (None: multiply those of the chip).
    folded: whether all sequential steps are lifted into one. carried: tiles that the body hands on from step to step.
    """

    kernel: Kernel
    buffers: Sequence[Buffer]
    ar: LaxArithmetic
    looped: frozenset[int]
    read_later: Set[int] = frozenset()
    gather: Gather | None = None
    folded: bool = False
    halos: Halos = field(default_factory=dict)
    carried: frozenset[Tile] = frozenset()

    @functools.cached_property
    def loads(self) -> Mapping[tuple[Any, ...], list[Window]]:
        """The windows of all loads, by `same_view`."""
        found: dict[tuple[Any, ...], list[Window]] = {}
        for i in self.kernel.instructions:
            if isinstance(i, dma.Load):
                found.setdefault(same_view(i.window), []).append(i.window)
        return found

    @functools.cached_property
    def joined_stores(self) -> frozenset[int]:
        """Buffers that several stores write through one view: these stores are deferred and joined."""
        views: dict[int, list[Any]] = {}
        for i in self.kernel.instructions:
            if isinstance(i, dma.Store):
                views.setdefault(i.window.buffer, []).append(view_axes(i.window))
        return frozenset(b for b, found in views.items() if len(found) > 1 and len(set(found)) == 1)

    @functools.cached_property
    def only_stored(self) -> frozenset[Tile]:
        """Tiles that only stores read."""
        stores = {i.window.tile for i in self.kernel.instructions if isinstance(i, dma.Store)}
        return frozenset(stores.difference(*(i.reads() for i in self.kernel.instructions if not isinstance(i, dma.Store))))

    @functools.cached_property
    def softmaxes(self) -> Mapping[int, Role]:
        """What instructions do in softmaxes whose maxima may lose NaN, by `id`; of native kernels alone."""
        return {} if self.ar.bitexact or self.folded else softmaxes(self.kernel.instructions, self.readers, self.makers)

    def readers(self, maker: Instruction) -> list[Instruction]:
        """The instructions that read what one with a single result writes; where that stays in its tile to the end of the section, all
        instructions of other sections and steps, too, that read the tile."""
        (tile,) = maker.writes()
        (_, section), place = self._place(maker)
        later = section[place + 1 :]
        end = next((n for n, i in enumerate(later) if tile in i.writes()), None)
        found = [i for i in later[: end if end is None else end + 1] if tile in i.reads()]
        if end is not None:
            return found
        before = section[:place] if tile in self.carried else ()
        others = (i for _, other in self.kernel.sections if other is not section for i in other)
        return [*found, *(i for i in (*before, *others) if tile in i.reads())]

    def makers(self, reader: Instruction, tile: Tile) -> list[Instruction]:
        """The instructions whose writes of a tile an instruction may find in it."""
        (name, section), place = self._place(reader)
        own = _last_writer(section[:place], tile)
        if own is not None:
            return [own]
        before = {"prologue": (), "body": (self.kernel.prologue, section), "epilogue": (self.kernel.prologue, self.kernel.body)}[name]
        return [maker for other in before if (maker := _last_writer(other, tile)) is not None]

    def _place(self, instruction: Instruction) -> tuple[tuple[str, Sequence[Instruction]], int]:
        """The section of an instruction with its name, and its place there."""
        places = ((section, place) for section in self.kernel.sections for place, i in enumerate(section[1]) if i is instruction)
        return next(places)

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
