"""What one kernel must satisfy by itself: its grid, instructions, tiles and semaphores, and what it may do to its buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tpuflow.chips.chip import Chip
from tpuflow.device.ordering import slot_bytes, space_bytes
from tpuflow.device.place import SECTIONS
from tpuflow.device.verify.footprint import Box, disjoint, injective, section_trips, store_box
from tpuflow.device.verify.instructions import check_fields, check_operands
from tpuflow.device.verify.order import check_order
from tpuflow.device.verify.refusal import Refusal
from tpuflow.device.verify.windows import check_tile, check_window
from tpuflow.isa import dma
from tpuflow.isa.instruction import MAX_RANK, RATES, SPACES, Instruction, Tile, Window
from tpuflow.isa.program import GRID_KINDS, Buffer, Kernel

MOST_SLOTS = 64


@dataclass(frozen=True, slots=True)
class Effects:
    """What a kernel does to HBM: buffers that must be valid before it, and the parts that it writes (None: somewhere)."""

    reads: frozenset[int]
    writes: tuple[tuple[int, Box | None], ...]


def check_kernel(kernel: Kernel, buffers: Sequence[Buffer], chip: Chip) -> Effects:
    """Refuse a kernel that breaks a rule; its effects otherwise."""
    _check_grid(kernel)
    tiles: set[Tile] = set()
    for number, instruction in enumerate(kernel.instructions):
        try:
            _check_instruction(kernel, buffers, chip, instruction, tiles)
        except Refusal as refusal:
            refusal.instruction = number
            raise
    _check_semaphores(kernel)
    writes, in_place = _check_buffers(kernel)
    check_order(kernel, chip, in_place)
    reads = {w.buffer for i in kernel.instructions for role, w in i.windows() if role == "read" or isinstance(i, dma.StoreIndexed)}
    return Effects(frozenset(reads), writes)


def _check_grid(kernel: Kernel) -> None:
    for axis in kernel.grid:
        if axis.kind not in GRID_KINDS or axis.size < 0:
            raise Refusal(f"a grid axis is {axis}; expected size >= 0 and kind {' or '.join(GRID_KINDS)}")
    kinds = [a.kind for a in kernel.grid]
    if kinds != sorted(kinds):
        raise Refusal(f"grid axes are {', '.join(kinds)}; expected the parallel ones first")
    if not kernel.sequential and (kernel.prologue or kernel.epilogue):
        raise Refusal("a kernel without sequential axes has a prologue or an epilogue; expected all its work in the body")
    if any(not 0 <= n < 2**31 for n in kernel.semaphores):
        raise Refusal(f"initial semaphore counts are {kernel.semaphores}; expected numbers of [0, 2^31)")


def _check_instruction(kernel: Kernel, buffers: Sequence[Buffer], chip: Chip, instruction: Instruction, tiles: set[Tile]) -> None:
    check_fields(kernel, instruction)
    for tile in (*instruction.reads(), *instruction.writes()):
        if tile not in tiles:
            _check_place(tile, chip)
            check_tile(kernel, tile)
            tiles.add(tile)
    for _, window in instruction.windows():
        check_window(kernel, buffers, window)
    check_operands(instruction)


def _check_place(tile: Tile, chip: Chip) -> None:
    if tile.space not in SPACES or tile.rate not in RATES or len(tile.axes) > (0 if tile.space == "smem" else MAX_RANK):
        found = f"a tile of rank {len(tile.axes)} in {tile.space!r}, its slots used by {tile.rate!r}"
        raise Refusal(f"{found}; expected rank <= {MAX_RANK} (0 in smem), spaces {', '.join(SPACES)}, rates {', '.join(RATES)}")
    if not 1 <= tile.slots <= MOST_SLOTS:
        raise Refusal(f"a tile has {tile.slots} slots; expected 1 to {MOST_SLOTS}")
    end, capacity = tile.address + tile.slots * slot_bytes(tile, chip), space_bytes(tile.space, chip)
    if tile.address < 0 or end > capacity:
        raise Refusal(
            f"a tile lies at bytes {tile.address} to {end} of {tile.space}; expected it within the {capacity} bytes of {chip.name}"
        )


def _check_semaphores(kernel: Kernel) -> None:
    ends: dict[tuple[type, int], str] = {}
    balance = {name: [0] * len(kernel.semaphores) for name in ("body", "prologue and epilogue")}
    for number, (section, i) in enumerate(_by_section(kernel)):
        if not isinstance(i, dma.Signal | dma.Wait):
            continue
        queue = ends.setdefault((type(i), i.semaphore), i.on)
        if queue != i.on:
            verb = "signalled" if isinstance(i, dma.Signal) else "waited for"
            raise Refusal(f"semaphore {i.semaphore} is {verb} by {i.on} and by {queue}; expected one queue", number)
        balance["body" if section == "body" else "prologue and epilogue"][i.semaphore] += 1 if isinstance(i, dma.Signal) else -1
    for where, counts in balance.items():
        for semaphore, n in enumerate(counts):
            if n:
                more = f"{abs(n)} more {'signals than waits' if n > 0 else 'waits than signals'}"
                raise Refusal(f"semaphore {semaphore} has {more} in {where}; expected as many", _user_of(kernel, semaphore, where))


def _user_of(kernel: Kernel, semaphore: int, where: str) -> int:
    """The first instruction that names a semaphore in the given sections."""
    return next(
        n for n, (section, i) in enumerate(_by_section(kernel))
        if isinstance(i, dma.Signal | dma.Wait) and i.semaphore == semaphore and (section == "body") == (where == "body")
    )  # fmt: skip


def _by_section(kernel: Kernel) -> Iterator[tuple[str, Instruction]]:
    for section in SECTIONS:
        yield from ((section, i) for i in getattr(kernel, section))


@dataclass(frozen=True, slots=True)
class _Access:
    """One window of one instruction."""

    number: int
    section: str
    instruction: Instruction
    window: Window


def _check_buffers(kernel: Kernel) -> tuple[tuple[tuple[int, Box | None], ...], dict[int, Window]]:
    """(parts written, windows of the buffers that are updated in place)."""
    accesses: dict[str, dict[int, list[_Access]]] = {"read": {}, "write": {}}
    for number, (section, i) in enumerate(_by_section(kernel)):
        for role, window in i.windows():
            accesses[role].setdefault(window.buffer, []).append(_Access(number, section, i, window))
    constant = _constant_registers(kernel, frozenset(accesses["write"]))
    writes: list[tuple[int, Box | None]] = []
    in_place: dict[int, Window] = {}
    for buffer, writers in accesses["write"].items():
        for access in writers:
            _check_injective(kernel, access, constant)
        boxes = [_box(kernel, a) for a in writers]
        _check_writers(writers, boxes)
        readers = accesses["read"].get(buffer, [])
        for access in readers:
            _check_in_place(kernel, access, writers, constant)
        if readers:
            in_place[buffer] = writers[0].window
        writes += [(buffer, box) for box in boxes]
    return tuple(writes), in_place


def _box(kernel: Kernel, access: _Access) -> Box | None:
    """The part that a store writes; None for an indexed one."""
    return None if isinstance(access.instruction, dma.StoreIndexed) else store_box(access.window, section_trips(kernel, access.section))


def _constant_registers(kernel: Kernel, written: frozenset[int]) -> frozenset[Tile]:
    """Registers that hold the same value whenever they are read: written by one instruction, from what never changes here."""
    writers: dict[Tile, int] = {}
    for i in kernel.instructions:
        for tile in i.writes():
            writers[tile] = writers.get(tile, 0) + 1
    constant: set[Tile] = set()
    for i in kernel.instructions:
        fixed_buffers = all(w.buffer not in written for _, w in i.windows())
        if fixed_buffers and all(t in constant for t in i.reads()):
            constant |= {t for t in i.writes() if t.space == "smem" and writers[t] == 1}
    return frozenset(constant)


def _check_injective(kernel: Kernel, access: _Access, constant: frozenset[Tile]) -> None:
    window = access.window
    rows = window.tile.axes[0] if isinstance(access.instruction, dma.StoreIndexed) else None
    if not injective(window, section_trips(kernel, access.section), constant, rows):
        what = "a row more than once" if rows else "an element more than once"
        raise Refusal(f"the store may write {what} of buffer {window.buffer} over the grid; expected each once", access.number)


def _check_writers(writers: list[_Access], boxes: list[Box | None]) -> None:
    for n, (access, box) in enumerate(zip(writers, boxes, strict=True)):
        for m in range(n):
            indexed = isinstance(access.instruction, dma.StoreIndexed) or isinstance(writers[m].instruction, dma.StoreIndexed)
            if indexed or not disjoint(box, boxes[m]):
                raise Refusal(
                    f"two stores of one kernel to buffer {access.window.buffer} are not shown to write different elements; expected "
                    "disjoint parts, and no other store beside an indexed one",
                    access.number,
                )


def _check_in_place(kernel: Kernel, access: _Access, writers: list[_Access], constant: frozenset[Tile]) -> None:
    window, writer = access.window, writers[0]
    plain = isinstance(access.instruction, dma.Load) and isinstance(writer.instruction, dma.Store) and len(writers) == 1
    same = plain and window.axes == writer.window.axes and window.tile.axes == writer.window.tile.axes
    steady = all(a.register is None or a.register in constant for a in window.axes)
    moves = any(g in kernel.sequential and e for a in window.axes for g, e in a.grid)
    if not (same and steady and (access.section == writer.section or not moves)):
        raise Refusal(
            f"the kernel reads buffer {window.buffer}, which it also writes, at another place; expected a load and a store with equal axes "
            "at the same grid index (an update in place)",
            access.number,
        )
