"""What one kernel must satisfy by itself: its grid, instructions, tiles and semaphores, and what it may do to its buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tpuflow.chips.chip import Chip
from tpuflow.device.resolved import Resolved, ResolvedKernel, resolve
from tpuflow.device.verify.budget import VerifyBudget
from tpuflow.device.verify.footprint import Box, clash, injective, section_trips, store_box
from tpuflow.device.verify.instructions import check_fields, check_operands
from tpuflow.device.verify.order import check_order
from tpuflow.device.verify.windows import check_tile, check_window
from tpuflow.isa import dma
from tpuflow.isa.core_parts import CoreParts
from tpuflow.isa.instruction import MAX_RANK, QUEUES, RATES, SPACES, Tile, TileAxis, Window, WindowAxis
from tpuflow.isa.occupancy import slot_bytes, space_bytes, vmem_stretches
from tpuflow.isa.program import GRID_KINDS, Buffer, Kernel
from tpuflow.isa.refusal import Refusal

MOST_SLOTS = 64
MOST_CLIPPED = MAX_RANK


@dataclass(frozen=True, slots=True)
class Effects:
    """The effects of a kernel on memory: buffers that must be valid before it, the parts of buffers that it writes (None: an unknown part),
    and the address ranges of VMEM that its tiles occupy (`vmem_stretches`)."""

    reads: frozenset[int]
    writes: tuple[tuple[int, Box | None], ...]
    tiles: tuple[tuple[int, int], ...] = ()

    def renumbered(self, buffers: Mapping[int, int]) -> Effects:
        """The same on other buffers."""
        return Effects(frozenset(buffers[b] for b in self.reads), tuple((buffers[b], box) for b, box in self.writes), self.tiles)


def check_kernel(kernel: Kernel, buffers: Sequence[Buffer], chip: Chip, effort: VerifyBudget) -> Effects:
    """Refuse a kernel that breaks a rule; its effects otherwise."""
    _check_grid(kernel)
    for number, instruction in enumerate(kernel.instructions):
        with _of_instruction(number):
            check_fields(kernel, instruction)
    found = resolve(kernel)
    checks = _Checks(kernel, buffers, chip, found.tiles)
    for i in found.instructions:
        with _of_instruction(i.number):
            checks.instruction(i)
    _check_clipped(kernel, found.tiles, effort)
    _check_semaphores(kernel, found.instructions)
    writes, in_place = _check_buffers(kernel, found)
    check_order(kernel, found, chip, in_place, effort)
    reads = {w.buffer for i in found.instructions for role, w in i.windows if role == "read" or i.is_indexed_store}
    return Effects(frozenset(reads), writes, vmem_stretches(found.tiles, chip))


@contextmanager
def _of_instruction(number: int) -> Iterator[None]:
    try:
        yield
    except Refusal as refusal:
        refusal.instruction = number
        raise


def _check_grid(kernel: Kernel) -> None:
    for axis in kernel.grid:
        if axis.kind not in GRID_KINDS or not 0 <= axis.size < 2**31:
            raise Refusal(f"a grid axis is {axis}; expected size >= 0 and < 2^31, and kind {' or '.join(GRID_KINDS)}")
    kinds = [a.kind for a in kernel.grid]
    if kinds != sorted(kinds):
        raise Refusal(f"grid axes are {', '.join(kinds)}; expected the parallel ones first")
    if not kernel.sequential and (kernel.prologue or kernel.epilogue):
        raise Refusal("a kernel without sequential axes has a prologue or an epilogue; expected all its work in the body")
    if any(not 0 <= n < 2**31 for n in kernel.semaphores):
        raise Refusal(f"initial semaphore counts are {kernel.semaphores}; expected numbers of [0, 2^31)")


@dataclass(slots=True)
class _Checks:
    """The rules of single instructions. `checked` has the tiles (by number) and windows (by id) that were checked before."""

    kernel: Kernel
    buffers: Sequence[Buffer]
    chip: Chip
    tiles: Sequence[Tile]
    checked: set[tuple[str, int]] = field(default_factory=set)

    def instruction(self, i: Resolved) -> None:
        """Refuse one whose tiles, windows or operands break a rule."""
        for number in (*i.reads, *i.writes):
            if self._first("tile", number):
                _check_place(self.tiles[number], self.chip)
                check_tile(self.kernel, self.tiles[number])
        for _, window in i.windows:
            if self._first("window", id(window)):
                check_window(self.kernel, self.buffers, window)
                self._keeps_apart(window)
        check_operands(i.instruction)

    def _keeps_apart(self, window: Window) -> None:
        buffer = self.buffers[window.buffer]
        found = CoreParts.of(self.kernel, self.chip.cores).strays(window, buffer.elems) if buffer.is_parted else ""
        if found:
            raise Refusal(f"one core may touch what another has of buffer {window.buffer}, which stays in vmem: {found}")

    def _first(self, what: str, number: int) -> bool:
        known = (what, number) in self.checked
        self.checked.add((what, number))
        return not known


def _check_place(tile: Tile, chip: Chip) -> None:
    if tile.space not in SPACES or tile.rate not in RATES or len(tile.axes) > (0 if tile.space == "smem" else MAX_RANK):
        found = f"a tile of rank {len(tile.axes)} in {tile.space!r}, its slots used by {tile.rate!r}"
        raise Refusal(f"{found}; expected rank <= {MAX_RANK} (0 in smem), spaces {', '.join(SPACES)}, rates {', '.join(RATES)}")
    if not 1 <= tile.slots <= MOST_SLOTS:
        raise Refusal(f"a tile has {tile.slots} slots; expected 1 to {MOST_SLOTS}")
    end, capacity = tile.address + tile.slots * slot_bytes(tile, chip), space_bytes(tile.space, chip)
    size = chip.tile_bytes(tuple(max(1, a.size) for a in tile.axes), tile.dtype.bytes)
    if any(a.size < 0 for a in tile.axes) or size > capacity:
        raise Refusal(f"a tile has sizes {list(tile.shape)}; expected them >= 0, together within the {capacity} bytes of {tile.space}")
    if tile.address < 0 or end > capacity:
        raise Refusal(
            f"a tile lies at bytes {tile.address} to {end} of {tile.space}; expected it within the {capacity} bytes of {chip.name}"
        )


def _check_clipped(kernel: Kernel, tiles: Collection[Tile], effort: VerifyBudget) -> None:
    """Limit the clipped grid axes: each doubles the combinations of tile shapes, and the fast engine translates every combination."""
    clipped = {a.grid for t in tiles for a in t.axes if a.grid >= 0 and a.extent % a.size}
    if len(clipped) > MOST_CLIPPED:
        raise Refusal(f"the last tile is shorter along the grid axes {sorted(clipped)}; expected at most {MOST_CLIPPED} such axes")
    effort.shape(len(kernel.instructions) << len(clipped))


def _check_semaphores(kernel: Kernel, found: Sequence[Resolved]) -> None:
    signaller: dict[int, str] = {}
    waiter: dict[int, str] = {}
    balance = {name: [0] * len(kernel.semaphores) for name in ("body", "prologue and epilogue")}
    for use in found:
        for semaphore, ends, verb, change in ((use.signals, signaller, "signalled", 1), (use.waits, waiter, "waited for", -1)):
            if semaphore is None:
                continue
            queue = QUEUES[use.queue]
            first = ends.setdefault(semaphore, queue)
            if first != queue:
                raise Refusal(f"semaphore {semaphore} is {verb} by {queue} and by {first}; expected one queue", use.number)
            balance["body" if use.section == "body" else "prologue and epilogue"][semaphore] += change
    for where, counts in balance.items():
        for semaphore, n in enumerate(counts):
            if n:
                more = f"{abs(n)} more {'signals than waits' if n > 0 else 'waits than signals'}"
                user = next(u for u in found if semaphore in (u.signals, u.waits) and (u.section == "body") == (where == "body"))
                raise Refusal(f"semaphore {semaphore} has {more} in {where}; expected as many", user.number)


@dataclass(frozen=True, slots=True)
class _Access:
    """One window of one instruction."""

    use: Resolved
    window: Window


def _check_buffers(kernel: Kernel, found: ResolvedKernel) -> tuple[tuple[tuple[int, Box | None], ...], dict[int, Window]]:
    """(parts written, windows of the buffers that are updated in place)."""
    accesses: dict[str, dict[int, list[_Access]]] = {"read": {}, "write": {}}
    for use in found.instructions:
        for role, window in use.windows:
            accesses[role].setdefault(window.buffer, []).append(_Access(use, window))
    constant = _constant_registers(found, frozenset(accesses["write"]))
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
    return None if access.use.is_indexed_store else store_box(access.window, section_trips(kernel, access.use.section))


def _constant_registers(found: ResolvedKernel, written: frozenset[int]) -> frozenset[Tile]:
    """Registers with a single value during the kernel: written by one instruction, from constant registers and buffers that it never
    writes."""
    writers = Counter(n for i in found.instructions for n in i.writes if found.tiles[n].space == "smem")
    constant: set[int] = set()
    for use in found.instructions if writers else ():
        if all(w.buffer not in written for _, w in use.windows) and all(t in constant for t in use.reads):
            constant |= {t for t in use.writes if writers[t] == 1}
    return frozenset(found.tiles[n] for n in constant)


def _check_injective(kernel: Kernel, access: _Access, constant: frozenset[Tile]) -> None:
    window = access.window
    rows = window.tile.axes[0] if access.use.is_indexed_store else None
    if not injective(window, section_trips(kernel, access.use.section), constant, rows):
        what = "a row more than once" if rows else "an element more than once"
        raise Refusal(f"the store may write {what} of buffer {window.buffer} over the grid; expected each once", access.use.number)


def _check_writers(writers: list[_Access], boxes: list[Box | None]) -> None:
    n = clash(boxes)
    if n is not None:
        raise Refusal(
            f"two stores of one kernel to buffer {writers[n].window.buffer} are not shown to write different elements; expected "
            "disjoint parts, and no other store beside an indexed one",
            writers[n].use.number,
        )


def _walks(window: Window) -> list[tuple[WindowAxis, TileAxis]]:
    """The axes of a window with those of its tile, without axes of one element at position 0, which make no difference."""
    pairs = zip(window.axes, window.tile.axes, strict=True)
    return [(a, t) for a, t in pairs if (t.size, t.grid, a.extent, a.origin, a.grid, a.register) != (1, -1, 1, 0, (), None)]


def _check_in_place(kernel: Kernel, access: _Access, writers: list[_Access], constant: frozenset[Tile]) -> None:
    window, writer = access.window, writers[0]
    plain = isinstance(access.use.instruction, dma.Load) and isinstance(writer.use.instruction, dma.Store) and len(writers) == 1
    same = plain and _walks(window) == _walks(writer.window)
    steady = all(a.register is None or a.register in constant for a in window.axes)
    moves = any(g in kernel.sequential and e for a in window.axes for g, e in a.grid)
    if not (same and steady and (access.use.section == writer.use.section or not moves)):
        raise Refusal(
            f"the kernel reads buffer {window.buffer}, which it also writes, at another place; expected a load and a store with equal axes "
            "at the same grid index (an update in place)",
            access.use.number,
        )
