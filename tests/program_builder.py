"""Builders of Programs for tests: buffers, tiles and kernels with fresh addresses, and changes to a finished Program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tpuflow import dtypes
from tpuflow.chips import get_chip
from tpuflow.dtypes import DType
from tpuflow.isa import dma
from tpuflow.isa.instruction import Instruction, Tile, TileAxis, Window
from tpuflow.isa.program import Block, Buffer, Constant, GridAxis, Kernel, Port, Program, Switch
from tpuflow.isa.windows import plain_window

PARALLEL, SEQUENTIAL = "parallel", "sequential"


@dataclass
class Builder:
    """Collects what a Program is made of. Buffers get fresh addresses one after the other."""

    chip: Any = field(default_factory=lambda: get_chip("generic"))
    buffers: list[Buffer] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    inputs: list[Port] = field(default_factory=list)
    outputs: list[Port] = field(default_factory=list)
    infeeds: list[Port] = field(default_factory=list)
    outfeeds: list[Port] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    next_address: int = 0

    def buffer(self, dtype: DType, shape: Sequence[int] = (), name: str = "", address: int | None = None) -> int:
        """A new buffer's index."""
        at = self.next_address if address is None else address
        made = Buffer(dtype, tuple(shape), at)
        self.next_address = max(self.next_address, at + (made.bytes + 63) // 64 * 64)
        self.buffers.append(made)
        self.names.append(name or f"b{len(self.buffers) - 1}")
        return len(self.buffers) - 1

    def shape(self, buffer: int) -> tuple[int, ...]:
        """Shape of a buffer."""
        return self.buffers[buffer].shape

    def input(self, name: str, dtype: DType, shape: Sequence[int] = (), donated: bool = False) -> int:
        """A new input's buffer."""
        made = self.buffer(dtype, shape, name)
        self.inputs.append(Port(name, dtype, tuple(shape), made, donated))
        return made

    def output(self, name: str, buffer: int) -> int:
        """Declare an existing buffer as an output."""
        b = self.buffers[buffer]
        self.outputs.append(Port(name, b.dtype, b.shape, buffer))
        return buffer

    def new_output(self, name: str, dtype: DType, shape: Sequence[int] = ()) -> int:
        """A new buffer that is an output."""
        return self.output(name, self.buffer(dtype, shape, name))

    def constant(self, data: Any, dtype: DType | None = None) -> int:
        """A new buffer with initial content."""
        array = np.asarray(data)
        array = array.astype(dtype.numpy) if dtype is not None else array
        made = self.buffer(dtypes.from_numpy(array.dtype), array.shape)
        self.constants.append(Constant(made, array.tobytes()))
        return made

    def infeed(self, name: str, dtype: DType, shape: Sequence[int] = ()) -> int:
        """A new infeed port's number."""
        self.infeeds.append(Port(name, dtype, tuple(shape)))
        return len(self.infeeds) - 1

    def outfeed(self, name: str, dtype: DType, shape: Sequence[int] = ()) -> int:
        """A new outfeed port's number."""
        self.outfeeds.append(Port(name, dtype, tuple(shape)))
        return len(self.outfeeds) - 1

    def program(self, *code: Block, name: str = "hand-built") -> Program:
        """The Program."""
        lists = (self.buffers, self.constants, self.inputs, self.outputs, self.infeeds, self.outfeeds)
        return Program(self.chip, *map(tuple, lists), code=code, name=name, buffer_names=tuple(self.names))  # type: ignore[arg-type]


@dataclass
class KernelBuilder:
    """Collects one kernel's sections, tiles (fresh addresses) and semaphores; every instruction gets a source line of its own."""

    owner: Builder
    grid: Sequence[tuple[int, str]] = ()
    name: str = "kernel"
    semaphores: list[int] = field(default_factory=list)
    sections: dict[str, list[tuple[Instruction, str]]] = field(default_factory=lambda: {"prologue": [], "body": [], "epilogue": []})
    free_bytes: dict[str, int] = field(default_factory=lambda: {"vmem": 0, "acc": 0, "smem": 0})
    releases: list[Instruction] = field(default_factory=list)

    def axis(self, extent: int, size: int, grid: int) -> TileAxis:
        """A blocked axis."""
        return TileAxis(size, grid, extent)

    def tile(self, dtype: DType, axes: Sequence[TileAxis | int] = (), space: str = "vmem", slots: int = 1, rate: str = "step") -> Tile:
        """A tile at a fresh address; plain numbers are unblocked axes."""
        full = tuple(TileAxis(a) if isinstance(a, int) else a for a in axes)
        made = Tile(space, self.free_bytes[space], dtype, full, slots, rate)
        self.free_bytes[space] += slots * self.owner.chip.tile_bytes(made.shape, dtype.bytes)
        return made

    def semaphore(self, initial: int = 0) -> int:
        """A new semaphore's number."""
        self.semaphores.append(initial)
        return len(self.semaphores) - 1

    def emit(self, *instructions: Instruction, section: str = "body") -> None:
        """Append instructions; the source line counts them."""
        for instruction in instructions:
            line = sum(map(len, self.sections.values())) + 1
            self.sections[section].append((instruction, f"{self.name}.py:{line}"))

    def window(self, buffer: int, tile: Tile) -> Window:
        """A plain window: tile axes are the buffer's axes in order."""
        return plain_window(buffer, self.owner.shape(buffer), tile)

    def load(self, window: Window, reader: str = "vector", section: str = "body") -> Tile:
        """Load a tile for one reading queue; call `release()` when the readers are done with what was loaded so far."""
        tile = window.tile
        if tile.space == "smem":
            self.emit(dma.Load(window), section=section)
            return tile
        free, ready = self.semaphore(tile.slots), self.semaphore()
        self.emit(dma.Wait("load", free), dma.Load(window), dma.Signal("load", ready), dma.Wait(reader, ready), section=section)
        self.releases.append(dma.Signal(reader, free))
        return tile

    def release(self, section: str = "body") -> None:
        """Give the slots of everything loaded since the last release back to the load queue."""
        self.emit(*self.releases, section=section)
        self.releases = []

    def result(self, tile: Tile, *compute: Instruction, window: Window, writer: str = "vector", section: str = "body") -> None:
        """Compute a tile and store it, double-buffered like loads."""
        free, ready = self.semaphore(tile.slots), self.semaphore()
        self.emit(dma.Wait(writer, free), *compute, dma.Signal(writer, ready), section=section)
        self.emit(dma.Wait("store", ready), dma.Store(window), dma.Signal("store", free), section=section)

    def kernel(self) -> Kernel:
        """The kernel."""
        parts = [tuple(i for i, _ in self.sections[s]) for s in ("prologue", "body", "epilogue")]
        sources = tuple(source for s in ("prologue", "body", "epilogue") for _, source in self.sections[s])
        grid = tuple(GridAxis(size, kind) for size, kind in self.grid)
        return Kernel(grid, tuple(self.semaphores), *parts, name=self.name, sources=sources)


def blocks(extent: int, size: int) -> int:
    """How many tiles of `size` an axis of `extent` needs."""
    return -(-extent // size)


# --- changing a Program


def edit_kernel(program: Program, change: Callable[[Kernel], Kernel], number: int = 0) -> Program:
    """The Program with its kernel number `number` (depth first) changed."""
    target = list(program.kernels())[number]

    def rebuilt(block: Block) -> Block:
        if block is target:
            return change(target)
        lists = {f.name: tuple(map(rebuilt, getattr(block, f.name))) for f in dataclasses.fields(block) if f.name in ("body", "condition")}
        if isinstance(block, Switch):
            lists["branches"] = tuple(tuple(map(rebuilt, branch)) for branch in block.branches)  # type: ignore[assignment]
        return block if isinstance(block, Kernel) else replace(block, **lists)

    return replace(program, code=tuple(map(rebuilt, program.code)))


def drop(kernel: Kernel, unwanted: Callable[[Instruction], bool]) -> Kernel:
    """The kernel without some instructions; the others keep their source lines."""
    return _with_instructions(kernel, lambda i: () if unwanted(i) else (i,))


def substitute(kernel: Kernel, change: Callable[[Instruction], Instruction]) -> Kernel:
    """The kernel with every instruction mapped."""
    return _with_instructions(kernel, lambda i: (change(i),))


def _with_instructions(kernel: Kernel, change: Callable[[Instruction], tuple[Instruction, ...]]) -> Kernel:
    sources = iter(kernel.sources or ("",) * len(kernel.instructions))
    kept: list[str] = []
    parts = []
    for section in (kernel.prologue, kernel.body, kernel.epilogue):
        made: list[Instruction] = []
        for instruction, source in zip(section, sources, strict=False):
            new = change(instruction)
            made += new
            kept += [source] * len(new)
        parts.append(tuple(made))
    return replace(kernel, prologue=parts[0], body=parts[1], epilogue=parts[2], sources=tuple(kept))
