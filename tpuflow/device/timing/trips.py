"""Which loops' trip counts the Program itself says: those known without running anything."""

from __future__ import annotations

from collections.abc import Mapping

from tpuflow.isa.collectives import Position
from tpuflow.isa.instruction import Tile
from tpuflow.isa.program import CallHost, Infeed, Kernel, Loop, Moving, Program, walk
from tpuflow.isa.vector import Constant

Number = int | float | bool


def known_trips(program: Program) -> Mapping[int, int]:
    """Buffer -> number, of the trip counts that are constants of the Program or only ever written with one and the same immediate."""
    blocks = [block for _, block in walk(program.code)]
    found: dict[int, set[Number | None]] = {block.trips: set() for block in blocks if isinstance(block, Loop)}
    for port in program.inputs:
        found.get(port.buffer, set()).add(None)
    for constant in program.constants:
        found.get(constant.buffer, set()).add(int.from_bytes(constant.data[:4], "little", signed=True))
    for block in blocks if found else ():
        if isinstance(block, Kernel):
            _stored(block, found)
        elif isinstance(block, Infeed | Position):
            found.get(block.buffer, set()).add(None)
        elif isinstance(block, Moving):
            found.get(block.target, set()).add(None)
        elif isinstance(block, CallHost):
            for target in block.targets:
                found.get(target, set()).add(None)
    single = {buffer: numbers.pop() for buffer, numbers in found.items() if len(numbers) == 1}
    return {buffer: int(number) for buffer, number in single.items() if number is not None}


def _stored(kernel: Kernel, found: Mapping[int, set[Number | None]]) -> None:
    """Add what a kernel stores to each buffer of `found`: the immediate, or None for anything else."""
    written = {w.buffer for i in kernel.instructions if i.windowed for role, w in i.windows() if role == "write"}
    if written.isdisjoint(found):
        return
    held: dict[Tile, Number] = {}
    for instruction in kernel.instructions:
        if isinstance(instruction, Constant):
            held[instruction.dst] = instruction.value
            continue
        for role, window in instruction.windows():
            if role == "write" and window.buffer in found:
                found[window.buffer].add(None if instruction.has("updates") else held.get(window.tile))
        for tile in instruction.writes():
            held.pop(tile, None)
