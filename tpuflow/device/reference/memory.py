"""Byte memories: buffers by regions of those that overlap, in HBM, VMEM and CMEM, and tiles. All is poisoned until something is written.

Poison is 0xFF in every byte: a NaN in every float type, -1 or the largest value in integers.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tpuflow.chips.chip import Chip
from tpuflow.device.reference.hazards import HbmShadow, Stamps
from tpuflow.isa.core_parts import core_of
from tpuflow.isa.instruction import SPACES, Tile, Window, WindowAxis
from tpuflow.isa.occupancy import slot_bytes, space_bytes
from tpuflow.isa.program import CMEM_START, VMEM_START, Buffer
from tpuflow.isa.windows import present, view_layout

POISON = 0xFF
Selection = tuple[slice, ...]


class Region:
    """A stretch of HBM, VMEM or CMEM that some buffers share: its bytes, and which buffer wrote every granule last (-1: none)."""

    def __init__(self, buffers: Sequence[Buffer]):
        self.base = min(b.span[0] for b in buffers)
        size = max(b.span[1] for b in buffers) - self.base
        self.granule = math.gcd(*(b.span[0] - self.base for b in buffers), *(b.dtype.bytes for b in buffers))
        self.bytes = np.full(size, POISON, np.uint8)
        self.owner = np.full(size // self.granule, -1, np.int32)

    @functools.cached_property
    def shadow(self) -> HbmShadow:
        """Who accessed every granule last; made for the first kernel whose queues may clash here."""
        return HbmShadow(self.owner.size)

    def clear(self) -> None:
        """Back to poison."""
        self.bytes.fill(POISON)
        self.owner.fill(-1)

    def lose(self, low: int, high: int) -> None:
        """Poison the bytes of [low, high) that lie here, in the numbering of `Buffer.span`: something that is no buffer took them."""
        start, end = max(0, low - self.base), min(self.bytes.size, high - self.base)
        if start < end:
            self.bytes[start:end] = POISON
            self.owner[start // self.granule : -(-end // self.granule)] = -1


class Hbm:
    """All buffers of a Program. Only addresses that some buffer uses take host memory."""

    def __init__(self, buffers: Sequence[Buffer]):
        self.buffers = buffers
        self.regions: list[Region] = []
        self._region_of: dict[int, Region] = {}
        for group in _overlapping(buffers):
            region = Region([buffers[n] for n in group])
            self.regions.append(region)
            self._region_of.update(dict.fromkeys(group, region))
        self._beside_tiles = [region for region in self.regions if VMEM_START <= region.base < CMEM_START]

    def clear(self) -> None:
        """Poison everything."""
        for region in self.regions:
            region.clear()

    def region(self, number: int) -> Region:
        """Where a buffer (of one element at least) lies."""
        return self._region_of[number]

    def array(self, number: int, item: int | None = None) -> np.ndarray:
        """The buffer's elements, a view of its bytes in its shape; of an item along its first axis, that alone."""
        return self._array(number) if item is None else self._array(number)[item, ...]

    def _array(self, number: int) -> np.ndarray:
        b = self.buffers[number]
        if not b.elems:
            return np.empty(b.shape, b.dtype.numpy)
        region = self._region_of[number]
        start = b.span[0] - region.base
        return region.bytes[start : start + b.bytes].view(b.dtype.numpy).reshape(b.shape)

    def granules(self, number: int, table: np.ndarray) -> np.ndarray:
        """A buffer's part of a table with one entry a granule of its region: [*shape, granules an element]."""
        b = self.buffers[number]
        if not b.elems:
            return np.empty((*b.shape, 1), table.dtype)
        region = self._region_of[number]
        start = (b.span[0] - region.base) // region.granule
        return table[start : start + b.bytes // region.granule].reshape(*b.shape, b.dtype.bytes // region.granule)

    def owners(self, number: int, item: int | None = None) -> np.ndarray:
        """Which buffer wrote every granule of a buffer, or of an item of it, last: [*shape, granules an element]."""
        found = self.granules(number, self._region_of[number].owner if self.buffers[number].elems else np.empty(0, np.int32))
        return found if item is None else found[item, ...]

    def write(self, number: int, array: np.ndarray, item: int | None = None) -> None:
        """Replace a buffer's whole content, or an item of it."""
        self.array(number, item)[...] = array
        self.owners(number, item)[...] = number

    def forget(self, number: int, item: int | None = None) -> None:
        """Poison a buffer, or an item of it: nothing has written it."""
        if self.buffers[number].elems:
            self.array(number, item).reshape(-1).view(np.uint8).fill(POISON)
            self.owners(number, item)[...] = -1

    def is_touched(self, number: int, item: int | None = None) -> bool:
        """Whether any of it has been written since it was forgotten."""
        return bool((self.owners(number, item) != -1).any())

    def is_written(self, number: int, item: int | None = None) -> bool:
        """Whether every element was last written as part of this very buffer."""
        return bool((self.owners(number, item) == number).all())

    def lose(self, stretches: Iterable[tuple[int, int]]) -> None:
        """Poison stretches of VMEM, in the numbering of `Buffer.span`: a kernel has tiles there."""
        for low, high in stretches:
            for region in self._beside_tiles:
                region.lose(low, high)

    def overlapping(self, numbers: Collection[int]) -> frozenset[int]:
        """Buffers that share a byte with one of some buffers, themselves included if they have any."""
        wanted = sorted(b.span for b in map(self.buffers.__getitem__, numbers) if b.bytes)
        starts, ends = [low for low, _ in wanted], list(itertools.accumulate((high for _, high in wanted), max))
        found = set()
        for n, b in enumerate(self.buffers):
            low, high = b.span
            before = bisect_left(starts, high)  # of those that start below its end, does one end above its start?
            if b.bytes and before and ends[before - 1] > low:
                found.add(n)
        return frozenset(found)


def _overlapping(buffers: Sequence[Buffer]) -> Iterator[list[int]]:
    """Groups of buffers connected by shared bytes; buffers of no bytes are in none."""
    group: list[int] = []
    end = -1
    for n in sorted((n for n, b in enumerate(buffers) if b.bytes), key=lambda n: buffers[n].span):
        if group and buffers[n].span[0] >= end:
            yield group
            group = []
        group.append(n)
        end = max(end, buffers[n].span[1])
    if group:
        yield group


class OnChip:
    """VMEM, accumulators and registers, as far as the tiles of the kernels so far reach."""

    def __init__(self, chip: Chip):
        self.chip = chip
        self._bytes = {space: np.empty(0, np.uint8) for space in SPACES}

    def reach(self, tiles: Sequence[Tile]) -> dict[str, int]:
        """Make room for the tiles of a kernel, as far as they lie within; how far they reach in each memory."""
        reach: dict[str, int] = {}
        for t in tiles:
            end = t.address + t.slots * slot_bytes(t, self.chip)
            reach[t.space] = max(reach.get(t.space, 0), min(end, space_bytes(t.space, self.chip)))
        for space, size in reach.items():
            if size > self._bytes[space].size:
                self._bytes[space] = np.empty(size, np.uint8)
        return reach

    def clear(self, reach: Mapping[str, int]) -> None:
        """Back to poison, as far as a kernel reaches."""
        for space, size in reach.items():
            self._bytes[space][:size] = POISON

    def problem(self, tile: Tile) -> str:
        """Why a tile is not within its memory; empty if it is."""
        end, capacity = tile.address + tile.slots * slot_bytes(tile, self.chip), space_bytes(tile.space, self.chip)
        if tile.address >= 0 and end <= capacity:
            return ""
        return f"lies at bytes {tile.address} to {end} of {tile.space}, which has {capacity}"

    def array(self, tile: Tile, slot: int, shape: tuple[int, ...]) -> np.ndarray:
        """The dense array of valid `shape` in a slot, a view of its bytes."""
        start = tile.address + slot * slot_bytes(tile, self.chip)
        size = math.prod(shape) * tile.dtype.bytes
        return self._bytes[tile.space][start : start + size].view(tile.dtype.numpy).reshape(shape)


@dataclass(frozen=True, slots=True)
class AxisSelection:
    """Which elements of a view axis meet which elements of a tile axis; `whole` if every tile element meets one."""

    view: slice
    tile: slice
    last: slice  # of the tile: the only element that a store along a standing axis leaves behind
    whole: bool


@dataclass
class WindowAccess:
    """A window over its buffer, ready to select tile after tile."""

    window: Window
    hbm: Hbm
    shadow: HbmShadow | None = None
    stamps: Stamps = field(init=False)
    data: np.ndarray = field(init=False)
    owner: np.ndarray = field(init=False)
    fill: np.ndarray = field(init=False)
    _seen: dict[tuple[int, int, int], AxisSelection] = field(init=False, default_factory=dict)
    _cores: np.ndarray | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        number = self.window.buffer
        self.data = self.view(self.hbm.array(number))
        self.owner = self.view(self.hbm.owners(number))
        tables = {} if self.shadow is None else self.shadow.stamps
        self.stamps = {key: self.view(self.hbm.granules(number, table)) for key, table in tables.items()}
        self.fill = np.asarray(self.window.fill).astype(self.window.tile.dtype.numpy)

    def cores(self, count: int) -> np.ndarray:
        """Which of `count` cores has each element, as the window sees them."""
        if self._cores is None:
            b = self.hbm.buffers[self.window.buffer]
            self._cores = self.view(core_of(np.arange(b.elems), max(1, b.elems), count).reshape(b.shape))
        return self._cores

    def view(self, array: np.ndarray) -> np.ndarray:
        """A [*shape, ...] array of the buffer as the window sees it, trailing axes kept; a view."""
        layout = view_layout(self.window)
        rank = len(self.hbm.buffers[self.window.buffer].shape)
        tail = array.shape[rank:]
        trailing = range(len(layout.dims), len(layout.dims) + len(tail))
        return array.reshape((*layout.dims, *tail)).transpose((*layout.permutation, *trailing))

    def select(self, i: int, length: int, base: int) -> AxisSelection:
        """Selection along window axis i for a tile axis of `length` whose element 0 sits at position `base`."""
        key = (i, length, base)
        found = self._seen.get(key)
        if found is None:
            found = self._seen[key] = select_axis(self.window.axes[i], length, base)
        return found


def select_axis(axis: WindowAxis, length: int, base: int) -> AxisSelection:
    """Positions that exist are evenly spaced on both sides, so slices say it all."""
    at, element = present(axis, length, base)
    tile = _as_slice(at)
    last = _as_slice(at[-1:]) if axis.step == 0 else tile
    return AxisSelection(_as_slice(element), tile, last, len(at) == length)


def _as_slice(positions: range) -> slice:
    """The slice that selects these positions, all of which are >= 0."""
    if not positions:
        return slice(0, 0)
    return slice(positions[0], positions.stop if positions.stop >= 0 else None, positions.step)
