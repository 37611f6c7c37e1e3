"""The kernel builder: templates record loads, computation and stores in program order; `build` adds slots, addresses and semaphores."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tpuflow.chips import Chip
from tpuflow.dtypes import DType
from tpuflow.errors import CompileError
from tpuflow.isa.bounds import Bound
from tpuflow.isa.dma import Load, Store
from tpuflow.isa.instruction import MAX_RANK, Instruction, Tile, TileAxis, Window
from tpuflow.isa.program import SECTIONS, GridAxis, Kernel
from tpuflow.lower.emit.nest import Axis, Nest
from tpuflow.lower.emit.onchip import REGISTER_BYTES, DoesNotFit, Lifetime, lifetime, place_tiles, slots_ahead
from tpuflow.lower.emit.sync import Synchronizer, Uses, tile_uses
from tpuflow.lower.graph.accesses import Access, AccessAxis

HELD_SHARE = 1 / 8  # of the scalar registers, for scalars that are loaded ahead of their use: each may have four slots


@dataclass(slots=True)
class KernelBuilder:
    """Records instructions on virtual tiles, whose addresses are distinct negative numbers until `build` places them.

    `build` merges the sections when there is no sequential axis, gives every tile its slots and address, and inserts the waits and
    signals that make the queues keep program order wherever two of them touch the same tile or buffer. `handed_slots`: of tiles that one
    compute queue fills for another.
    """

    chip: Chip
    grid: tuple[GridAxis, ...]
    name: str = ""
    scope: str = ""
    source: str = ""  # the user's line of whatever is emitted next
    section: str = "body"  # where it goes
    code: dict[str, list[Instruction]] = field(default_factory=lambda: {s: [] for s in SECTIONS})
    lines: dict[str, list[str]] = field(default_factory=lambda: {s: [] for s in SECTIONS})
    tiles: int = 0
    reads: dict[Access, None] = field(default_factory=dict)  # of buffers
    writes: dict[Access, None] = field(default_factory=dict)
    handed_slots: int = 2
    shared: Mapping[int, int] = field(default_factory=dict)  # buffers written -> those read that they may be one with
    starts: dict[Tile, int] = field(default_factory=dict)  # register -> the buffer of the scalar that it was loaded with

    def tile(self, dtype: DType, axes: tuple[TileAxis, ...] = (), space: str = "vmem") -> Tile:
        """A new tile.

        Raises:
          CompileError: more axes than a tile can have.
        """
        if len(axes) > MAX_RANK:
            raise CompileError(
                f"{self.source or self.name}: the kernel {self.name!r} needs tiles with {len(axes)} axes that do not collapse; a tile has "
                f"at most {MAX_RANK}. Reshape the arrays so that neighbouring axes merge."
            )
        self.tiles += 1
        return Tile(space, -self.tiles, dtype, axes)

    def emit(self, instruction: Instruction) -> None:
        """Append an instruction to the current section."""
        self.code[self.section].append(instruction)
        self.lines[self.section].append(self.source)

    def load(self, nest: Nest, window: Window, axes: Sequence[Axis], index: int | None = None) -> None:
        """Record the load of a tile with the given merged axes. index: for an indexed load, the buffer of the row numbers
        along the major axis; the caller emits its instruction.
        """
        if not window.tile.axes and not window.axes:
            self.starts[window.tile] = window.buffer
        self._access(self.reads, nest, window, axes, index)
        if index is None:
            self.emit(Load(window))

    def load_halo(self, nest: Nest, window: Window, windows: Iterable[Window], axes: Sequence[Axis]) -> None:
        """Record the load of a halo tile, for what each of `windows`, with the given merged axes, reads of it."""
        for one in windows:
            self._access(self.reads, nest, one, axes, None)
        self.emit(Load(window))

    def load_state(self, window: Window) -> None:
        """Record the load of a small array, the same whole one at every point."""
        self.reads[Access(window.buffer, (AccessAxis(Bound(window.tile.elems, ())),))] = None
        self.emit(Load(window))

    def store(self, nest: Nest, window: Window, axes: Sequence[Axis], index: int | None = None) -> None:
        """Store a tile, as `load` loads one."""
        self._access(self.writes, nest, window, axes, index)
        if index is None:
            self.emit(Store(window))

    def _access(self, side: dict[Access, None], nest: Nest, window: Window, axes: Sequence[Axis], index: int | None) -> None:
        found = nest.accessed(window, axes, self.starts)
        if index is not None:  # of a table of one element no axis is told
            major, *others = found or (AccessAxis(Bound(1, ())),)
            found = (replace(major, start=index), *others)
        side[Access(window.buffer, found)] = None

    def append_all(self, others: Iterable[KernelBuilder]) -> None:
        """Append the instructions of other builders, whose grids have one step: all loads first, then all computation, then all stores.

        So the load queue runs ahead of everything.
        """
        recorded: list[tuple[Instruction, str]] = []
        for other in others:
            moved = partial(_renumbered, by=self.tiles)
            self.tiles += other.tiles
            for s in SECTIONS:
                recorded += [(_replace_tiles(i, moved), line) for i, line in zip(other.code[s], other.lines[s], strict=True)]
        for instruction, line in sorted(recorded, key=lambda entry: _phase(entry[0])):
            self.code["body"].append(instruction)
            self.lines["body"].append(line)

    def build(self, *, single_buffered: bool = False) -> Kernel:
        """The finished kernel. single_buffered: tiles that one queue computes for another have one slot, whatever `handed_slots` says.

        Raises:
          DoesNotFit: its tiles need more on-chip memory than the chip has.
        """
        if all(g.kind == "parallel" for g in self.grid):
            self._merge_sections()
        self._scalars_first()
        uses = tile_uses(self.code)
        lives, placed = self._placed(uses, 1 if single_buffered else self.handed_slots)
        sync = Synchronizer(self.code)
        for tile, life in lives.items():
            sync.order_tile(uses[tile], life.slots, reused=life.fills > life.slots)
        sync.order_buffers(self.shared)
        rendered = {s: tuple(sync.render(s, lambda i: _replace_tiles(i, placed.__getitem__))) for s in SECTIONS}
        sources = tuple(self.lines[s][owner] if self.lines[s] else "" for s in SECTIONS for _, owner in rendered[s])
        sections = (tuple(i for i, _ in rendered[s]) for s in SECTIONS)
        return Kernel(self.grid, tuple(sync.semaphores), *sections, name=self.name, scope=self.scope, sources=sources)

    def _placed(self, uses: Mapping[Tile, Uses], computed: int) -> tuple[dict[Tile, Lifetime], dict[Tile, Tile]]:
        """Lifetimes and addresses of tiles, with as many slots for DMAs as are useful and fit. computed: slots of tiles that a queue
        computes for another.
        """
        for ahead in range(slots_ahead(uses, self.chip), 2, -1):
            lives = {tile: lifetime(u, self.grid, ahead, computed) for tile, u in uses.items()}
            with suppress(DoesNotFit):
                return lives, place_tiles(uses, lives, self.chip)
        lives = {tile: lifetime(u, self.grid, computed=computed) for tile, u in uses.items()}
        return lives, place_tiles(uses, lives, self.chip)

    def _scalars_first(self) -> None:
        """Move scalar loads to the start of their section, so that the scalar unit waits for memory once; unless they are so many that they
        would hold too many registers.
        """
        stored = {w.buffer for s in SECTIONS for i in self.code[s] for role, w in i.windows() if role != "read"}
        for s in SECTIONS:
            later = [not _loads_scalar(i, stored) for i in self.code[s]]
            if later.count(False) * REGISTER_BYTES <= self.chip.smem_bytes * HELD_SHARE:
                order = sorted(range(len(later)), key=later.__getitem__)
                self.code[s] = [self.code[s][at] for at in order]
                self.lines[s] = [self.lines[s][at] for at in order]

    def _merge_sections(self) -> None:
        for by_section in (self.code, self.lines):
            merged: list[Any] = [entry for s in SECTIONS for entry in by_section[s]]
            by_section.update({"prologue": [], "body": merged, "epilogue": []})  # type: ignore[arg-type]


def _loads_scalar(instruction: Instruction, stored: Container[int]) -> bool:
    """Whether an instruction loads a register from a static address in a buffer that the kernel does not write."""
    if not isinstance(instruction, Load) or instruction.window.tile.space != "smem" or instruction.window.buffer in stored:
        return False
    return all(axis.register is None for axis in instruction.window.axes)


def _phase(instruction: Instruction) -> int:
    return 0 if isinstance(instruction, Load) else 2 if isinstance(instruction, Store) else 1


def _renumbered(tile: Tile, by: int) -> Tile:
    """A virtual tile renumbered to follow `by` others."""
    return replace(tile, address=tile.address - by)


def _replace_tiles(instruction: Instruction, place: Callable[[Tile], Tile]) -> Instruction:
    """The instruction with every tile put through `place`."""

    values = [_PUT[kind.name](value, place) if kind.name in _PUT else value for _, kind, value in instruction.fields()]
    return type(instruction)(*values)


def _put_window(window: Window, place: Callable[[Tile], Tile]) -> Window:
    axes = tuple([a if a.register is None else replace(a, register=place(a.register)) for a in window.axes])
    return replace(window, tile=place(window.tile), axes=axes)


_PUT: Mapping[str, Callable[[Any, Callable[[Tile], Tile]], Any]] = {
    "tile": lambda tile, place: place(tile),
    "tiles": lambda tiles, place: tuple(map(place, tiles)),
    "window": _put_window,
}
"""For every kind of field with tiles: how a map of tiles is applied to its value."""
