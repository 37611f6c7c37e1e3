"""On-chip allocation: an address for every tile of a kernel in VMEM, the accumulators or the scalar registers.

A tile that crosses queues or sections has bytes of its own, for each of its slots, throughout the kernel. A tile that one queue writes and
reads within one section is temporary: its bytes are reused once it is dead, which is safe because a queue runs in order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpuflow.chips import Chip
from tpuflow.isa.instruction import Tile
from tpuflow.isa.program import SECTIONS, GridAxis
from tpuflow.lower.emit.sync import Place, Uses
from tpuflow.lower.tiling import useful_slots

REGISTER_BYTES = 4
ALIGNMENT_BYTES = {"vmem": 128, "acc": 128, "smem": REGISTER_BYTES}


class DoesNotFit(Exception):
    """The tiles of a kernel need more on-chip memory than there is; smaller tiles may do."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """How a tile is used: its slots; its rate, at which the slot advances ("step" or "point" of the grid); how often it is filled in all;
    and whether it is temporary.
    """

    slots: int
    rate: str
    fills: int
    temporary: bool


def lifetime(uses: Uses, grid: Sequence[GridAxis], ahead: int = 2, computed: int = 2) -> Lifetime:
    """A tile's lifetime. It has one slot if a single queue uses it, or if it is filled once; `ahead` slots if a DMA fills or empties it
    every step, two if at every point; `computed` slots if one compute queue hands it to another.

    The slots of a tile that is used in the body only advance every step, others every point.
    """
    every_step = uses.sections == {SECTIONS.index("body")}
    fills = math.prod(g.size for g in grid if every_step or g.kind == "parallel")
    crosses = bool(uses.consumers)
    moved = _moved(uses)
    slots = min(fills, ahead if every_step and moved else 2 if moved else computed) if crosses else 1
    return Lifetime(slots, "step" if every_step else "point", fills, not crosses and len(uses.sections) == 1)


def _moved(uses: Uses) -> bool:
    """Whether a DMA fills or empties the tile."""
    return uses.writer == "load" or "store" in uses.consumers


def slots_ahead(uses: Mapping[Tile, Uses], chip: Chip) -> int:
    """The slots for tiles of DMAs, from the bytes that a step moves (`tiling.useful_slots`)."""
    body = {SECTIONS.index("body")}
    return useful_slots(sum(slot_bytes(tile, chip) for tile, u in uses.items() if u.sections == body and u.consumers and _moved(u)), chip)


def slot_bytes(tile: Tile, chip: Chip) -> int:
    """Bytes of one slot."""
    return REGISTER_BYTES if tile.space == "smem" else chip.tile_bytes(tile.shape, tile.dtype.bytes)


def place_tiles(uses: Mapping[Tile, Uses], lifetimes: Mapping[Tile, Lifetime], chip: Chip) -> dict[Tile, Tile]:
    """recorded (virtual) tile -> final tile, with address, slots and rate.

    Raises:
      DoesNotFit: a memory overflows.
    """
    capacity = {"vmem": chip.vmem_bytes, "acc": chip.acc_bytes, "smem": chip.smem_bytes}
    top: dict[str, int] = defaultdict(int)
    placed: dict[Tile, Tile] = {}
    temporary: dict[tuple[str, str], list[Tile]] = defaultdict(list)
    for tile, life in lifetimes.items():
        if life.temporary:
            temporary[tile.space, uses[tile].writer].append(tile)
            continue
        placed[tile] = Tile(tile.space, top[tile.space], tile.dtype, tile.axes, life.slots, life.rate)
        top[tile.space] += _aligned(slot_bytes(tile, chip) * life.slots, tile.space)
    for (space, _), tiles in temporary.items():
        addresses, used = _reuse([(uses[t].places[0], uses[t].places[-1], _aligned(slot_bytes(t, chip), space)) for t in tiles])
        placed |= {t: Tile(space, top[space] + a, t.dtype, t.axes, t.slots, t.rate) for t, a in zip(tiles, addresses, strict=True)}
        top[space] += used
    for space, used in top.items():
        if used > capacity[space]:
            raise DoesNotFit(f"{used} bytes of {space}, {chip.name} has {capacity[space]}")
    return placed


def _aligned(size: int, space: str) -> int:
    unit = ALIGNMENT_BYTES[space]
    return -(-size // unit) * unit


def _reuse(spans: Sequence[tuple[Place, Place, int]]) -> tuple[list[int], int]:
    """First-fit addresses for (first use, last use, bytes) in order of first use, and the bytes needed in all."""
    live: list[tuple[int, int, Place]] = []  # address, end, last use; sorted by address
    addresses, used = [], 0
    for first, last, size in spans:
        live = [span for span in live if span[2] >= first]
        address = _first_gap(live, size)
        live = sorted([*live, (address, address + size, last)], key=lambda span: span[0])
        addresses.append(address)
        used = max(used, address + size)
    return addresses, used


def _first_gap(live: Sequence[tuple[int, int, Place]], size: int) -> int:
    address = 0
    for start, end, _ in live:
        if start - address >= size:
            return address
        address = max(address, end)
    return address
