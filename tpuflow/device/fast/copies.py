"""Copies to the chip as if there were none: kernels read what was copied where it was copied from.

An array under two numbers would be two arrays to whatever looks for updates in place, and to executables that hand them on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tpuflow.device.fast.liveness import reads, writes
from tpuflow.isa.program import Block, Copy, Kernel, Loop, Program, Switch, While, children, walk


def read_at_home(program: Program) -> Program:
    """The same Program whose kernels read the sources of copies in place of their targets, as long as both hold the same and in the list of
    blocks that has the copy. The copies stay."""
    if not any(isinstance(block, Copy) for _, block in walk(program.code)):
        return program
    return replace(program, code=_blocks(program, program.code))


def _blocks(program: Program, code: Sequence[Block]) -> tuple[Block, ...]:
    home: dict[int, int] = {}
    made: list[Block] = []
    for block in code:
        changed = _written(block)
        match block:
            case Kernel() if home:
                here = {b: home[b] for b in reads(block) if b in home}
                made.append(block.on(here, "read") if here else block)
            case Loop():
                made.append(replace(block, body=_blocks(program, block.body)))
            case While():
                condition, body = (_blocks(program, part) for part in (block.condition, block.body))
                made.append(replace(block, condition=condition, body=body))
            case Switch():
                made.append(replace(block, branches=tuple(_blocks(program, branch) for branch in block.branches)))
            case _:
                made.append(block)
        home = {target: source for target, source in home.items() if not {target, source} & changed} if home else home
        if isinstance(block, Copy) and _is_same(program, block):
            home[block.target] = home.get(block.source, block.source)
    return tuple(made)


def _written(block: Block) -> frozenset[int]:
    return writes(block).union(*(_written(b) for _, code in children(block) for b in code))


def _is_same(program: Program, copy: Copy) -> bool:
    """Whether a copy moves a whole array from HBM to the chip."""
    source, target = (program.buffers[n] for n in (copy.source, copy.target))
    return copy.index < 0 and source.space == "hbm" != target.space and (source.shape, source.dtype) == (target.shape, target.dtype)
