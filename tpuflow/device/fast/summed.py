"""Products whose results are only ever summed over chips, such as the weight gradients of data-parallel training.

An all-reduce of one product per chip is one product with the chips' contracted axes concatenated: same sum, in another order, so this is
for native fidelity alone. The chips' partial products are then never stored, which for a layer's weights on eight chips are eight arrays
of their size.

A partial product may be scaled by a power of two before it is stored (a mean over eight chips scales by 1/8). That rounds nothing, so it
makes no difference that the sum is scaled instead.
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
    """`buffers`: number -> mesh axes, of buffers that hold the sum over these axes at once. `kernels`: the same of their writers, by id."""

    buffers: Mapping[int, Axes]
    kernels: Mapping[int, Axes]


def summed(program: Program, divergent: frozenset[int]) -> Summed:
    """The buffers and kernels of a Program that can hold sums; divergent: the ids of blocks that some chips may not reach."""
    users, buffers, kernels = _Users(program, divergent), dict[int, Axes](), dict[int, Axes]()
    for _, block in walk(program.code):
        if isinstance(block, Collective) and block.reducer == "add" and KINDS[block.kind].reduces:
            for buffer, writer in users.summed(block).items():
                buffers[buffer] = kernels[id(writer)] = block.axes
    return Summed(buffers, kernels)


class _Users:
    """The writers and readers of every buffer of a Program."""

    def __init__(self, program: Program, divergent: frozenset[int]):
        self.divergent = divergent
        self.seen = frozenset(x.buffer for x in (*program.inputs, *program.outputs, *program.constants))
        self.writers: dict[int, list[Block]] = {}
        self.readers: dict[int, list[Block]] = {}
        for _, block in walk(program.code):
            for table, touched in ((self.writers, writes(block)), (self.readers, reads(block))):
                for buffer in touched:
                    table.setdefault(buffer, []).append(block)

    def summed(self, reader: Block) -> dict[int, Kernel]:
        """The buffers that can hold sums over chips among those that `reader` reads and, back to the products, those that they are made of,
        each with the kernel that writes it. Empty unless all of them can."""
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
        """The kernel that writes `buffer`, if it writes no other buffer, no other block writes this one, and only `reader` reads it."""
        if buffer in self.seen or self.readers[buffer] != [reader] or len(self.writers.get(buffer, ())) != 1:
            return None
        (writer,) = self.writers[buffer]
        if not isinstance(writer, Kernel) or id(writer) in self.divergent:
            return None
        return writer if writes(writer) == {buffer} and buffer not in reads(writer) else None


_OWN, _SUMS = "own", "sums"
"""Abstract contents of a tile, besides a known number: any values of one chip, or f32 sums of products, which may become all chips'."""

Held = Callable[[Tile], object]


def _stores_sums(kernel: Kernel, *, of_sums: bool) -> bool:
    """Whether all that a kernel stores is `_SUMS`, perhaps scaled by powers of two; of_sums: whether it loads `_SUMS`, not `_OWN`."""
    tiles: dict[Tile, object] = {}
    loads = _SUMS if of_sums else _OWN
    return all(_follows(i, tiles, loads) for i in kernel.instructions if not isinstance(i, dma.Signal | dma.Wait))


def _follows(instruction: Instruction, tiles: dict[Tile, object], loads: str) -> bool:
    """Record in `tiles` the contents that an instruction writes; false if they are not known, or not the same at every write of a tile."""
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
    """The content that an instruction writes, given what tiles hold; None if it is not known."""
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
"""Rules of the instructions that keep sums or make a known number. Any other instruction makes `_OWN` of operands that are no sums."""
