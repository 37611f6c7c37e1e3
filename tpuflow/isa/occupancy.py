"""The on-chip memory that tiles occupy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tpuflow.chips.chip import Chip
from tpuflow.isa.instruction import Tile
from tpuflow.isa.program import VMEM_START, Kernel, Program


def slot_bytes(tile: Tile, chip: Chip) -> int:
    """Bytes from one slot of a tile to the next: its padded size on the chip."""
    return chip.tile_bytes(tile.shape, tile.dtype.bytes)


def slot_span(tile: Tile, slot: int, chip: Chip) -> tuple[int, int]:
    """First byte of a slot, and the first one after it."""
    size = slot_bytes(tile, chip)
    return tile.address + slot * size, tile.address + (slot + 1) * size


def space_bytes(space: str, chip: Chip) -> int:
    """Capacity of an on-chip memory."""
    return {"vmem": chip.vmem_bytes, "acc": chip.acc_bytes, "smem": chip.smem_bytes}[space]


def tile_end(kernel: Kernel, space: str, chip: Chip) -> int:
    """Bytes of a core's on-chip memory up to the end of the tile of a kernel that lies highest in it."""
    tiles = {id(t): t for i in kernel.instructions for t in (*i.reads(), *i.writes()) if t.space == space}  # hashing tiles takes longer
    return max((t.address + t.slots * slot_bytes(t, chip) for t in tiles.values()), default=0)


def tile_ends(program: Program, space: str) -> Mapping[int, int]:
    """`tile_end` of every kernel of a Program on its chip, by the kernel's `id`."""
    forms = program.forms_by_id()
    ends = {forms[id(kernel)].number: tile_end(kernel, space, program.chip) for kernel in program.distinct_kernels()}
    return {kernel: ends[form.number] for kernel, form in forms.items()}


def vmem_stretches(tiles: Iterable[Tile], chip: Chip) -> tuple[tuple[int, int], ...]:
    """Stretches of VMEM [start, end) that tiles take, apart and ascending, in the numbering of `Buffer.span`: that of all cores."""
    found: list[tuple[int, int]] = []
    taken = ((t.address * chip.cores, t.slots * slot_bytes(t, chip) * chip.cores) for t in tiles if t.space == "vmem")
    for low, size in sorted((VMEM_START + address, size) for address, size in taken):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], low + size)
        elif size:
            found.append((low, low + size))
    return tuple(found)
