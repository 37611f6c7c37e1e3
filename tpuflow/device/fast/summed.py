"""Kernels of which nothing but the sum over chips is wanted, such as the gradients of a data-parallel training.

Each chip multiplies what it has, and the products are added up: natively, where sums have no order of their own, that is one product with
the chips' terms side by side. A chip's own product is then never made: of a layer's weights, eight arrays of their size on eight chips.

A chip's product may be scaled by a power of two before it is stored (the mean of eight chips' gradients is that of eighths), which rounds
nothing, so the sum may be scaled instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tpuflow.device.fast.liveness import reads, writes
from tpuflow.dtypes import F32
from tpuflow.isa import dma, matrix, vector
from tpuflow.isa.collectives import KINDS, Collective
from tpuflow.isa.instruction import Instruction, Tile
from tpuflow.isa.program import Block, Kernel, Program, walk

Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Summed:
    """`buffers`: those that hold their sums over chips, with the mesh axes of these; `kernels`: the same of what writes them, by its id."""

    buffers: Mapping[int, Axes]
    kernels: Mapping[int, Axes]


def summed(program: Program, uneven: frozenset[int]) -> Summed:
    """Of a Program; uneven: the ids of blocks that not every chip may come to."""
    users, buffers, kernels = _Users(program, uneven), dict[int, Axes](), dict[int, Axes]()
    for _, block in walk(program.code):
        if isinstance(block, Collective) and block.reducer == "add" and KINDS[block.kind].reduces:
            for buffer, writer in users.summed(block).items():
                buffers[buffer] = kernels[id(writer)] = block.axes
    return Summed(buffers, kernels)


class _Users:
    """What writes each buffer of a Program, and what reads it."""

    def __init__(self, program: Program, uneven: frozenset[int]):
        self.uneven = uneven
        self.seen = frozenset(x.buffer for x in (*program.inputs, *program.outputs, *program.constants))
        self.writers: dict[int, list[Block]] = {}
        self.readers: dict[int, list[Block]] = {}
        for _, block in walk(program.code):
            for table, touched in ((self.writers, writes(block)), (self.readers, reads(block))):
                for buffer in touched:
                    table.setdefault(buffer, []).append(block)

    def summed(self, reader: Block) -> dict[int, Kernel]:
        """The buffers that a block reads with the kernels that write them, and so on back to products, if all can be sums; else none."""
        found: dict[int, Kernel] = {}
        for buffer in reads(reader):
            writer = self._only_writer(buffer, reader)
            if writer is None:
                return {}
            found[buffer] = writer
            if not _stores_sums(writer, of_sums=False):
                before = self.summed(writer) if _stores_sums(writer, of_sums=True) else {}
                if not before:
                    return {}
                found |= before
        return found

    def _only_writer(self, buffer: int, reader: Block) -> Kernel | None:
        """The kernel that writes a buffer, and nothing else, if nothing besides writes it or reads it."""
        if buffer in self.seen or self.readers[buffer] != [reader] or len(self.writers.get(buffer, ())) != 1:
            return None
        (writer,) = self.writers[buffer]
        if not isinstance(writer, Kernel) or id(writer) in self.uneven:
            return None
        return writer if writes(writer) == {buffer} and buffer not in reads(writer) else None


_OWN, _SUMS = "own", "sums"
"""What a tile may hold besides a number: anything of a chip's own, or sums of products, which are to be those of all chips."""

Held = Callable[[Tile], object]


def _stores_sums(kernel: Kernel, *, of_sums: bool) -> bool:
    """Whether all that a kernel stores are f32 sums of products, times powers of two; of_sums: whether what it loads are such."""
    tiles: dict[Tile, object] = {}
    loads = _SUMS if of_sums else _OWN
    return all(_follows(i, tiles, loads) for i in kernel.instructions if not isinstance(i, dma.Signal | dma.Wait))


def _follows(instruction: Instruction, tiles: dict[Tile, object], loads: str) -> bool:
    """Whether it is known what an instruction makes of what tiles hold, and that the tiles hold the same all the time."""
    if isinstance(instruction, dma.Store):
        return tiles.get(instruction.window.tile) == _SUMS
    if any(role == "write" for role, _ in instruction.windows()):
        return False
    made = _load(instruction, loads) if isinstance(instruction, dma.Load) else _made(instruction, tiles.get)
    return made is not None and all(tiles.setdefault(tile, made) == made for tile in instruction.writes())


def _load(i: dma.Load, loads: str) -> object:
    plain = i.window.tile.dtype == F32 and i.window.fill == 0
    return loads if plain or loads == _OWN else None


def _made(instruction: Instruction, held: Held) -> object:
    """What an instruction makes; None: nothing that is known."""
    rule = _RULES.get(type(instruction))
    made = None if rule is None else rule(instruction, held)
    if made is None and all(held(tile) is not None and held(tile) != _SUMS for tile in instruction.reads()):
        return _OWN
    return made


def _scaled(i: vector.Binary, held: Held) -> object:
    scale = held(i.b)
    exact = isinstance(scale, float) and math.isfinite(scale) and abs(math.frexp(scale)[0]) == 0.5
    return _SUMS if held(i.a) == _SUMS and i.op in ("mul", "div") and exact else None


def _multiplied(i: matrix.MatmulAccumulate, held: Held) -> object:
    plain = i.acc.dtype == F32 and i.a.dtype.is_float
    return _SUMS if plain and (held(i.acc), held(i.a), held(i.b)) == (_SUMS, _OWN, _OWN) else None


def _kept(i: matrix.MatmulRead, held: Held) -> object:
    return held(i.acc) if i.dst.dtype == i.acc.dtype else None


_RULES: Mapping[type[Instruction], Callable[[Any, Held], object]] = {
    vector.Constant: lambda i, held: i.value,
    vector.Transpose: lambda i, held: held(i.a),
    vector.Binary: _scaled,
    matrix.MatmulZero: lambda i, held: _SUMS if i.acc.dtype == F32 else None,
    matrix.MatmulAccumulate: _multiplied,
    matrix.MatmulRead: _kept,
}
"""What instructions make of sums, and of nothing; all others make something of a chip's own of what is such."""
