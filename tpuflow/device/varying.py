"""What may differ from chip to chip: for each buffer, and for each block's being run, the mesh axes along which it may.

Both are found from the Program alone, whatever the data. Chips start with equal constants, and with inputs and infeed items that differ
along the axes that these are cut over; positions differ; what is received by all alike does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from tpuflow.isa.collectives import KINDS, Await, Collective, Position
from tpuflow.isa.program import Block, Infeed, Kernel, Loop, Outfeed, Port, Program, Switch, While, walk

Axes = frozenset[int]
NONE: Axes = frozenset()


@dataclass(frozen=True, slots=True)
class Varying:
    """`buffers`: along which axes the content of each may differ. `decided`: the same of whether, or how often, a block of control has run
    what is in it, by the block's id."""

    buffers: tuple[Axes, ...]
    decided: dict[int, Axes]


def cut_axes(port: Port) -> Axes:
    """The axes over which a port's arrays are cut."""
    return frozenset(a for axes in port.cut for a in axes)


def varying(program: Program) -> Varying:
    """Of a Program whose blocks name buffers and axes that there are."""
    found = _Spread(program)
    while found.grew:
        found.grew = False
        found.blocks(program.code, NONE)
    return Varying(tuple(found.buffers), found.decided)


class _Spread:
    """Walks over the blocks until nothing grows any more: a buffer takes on whatever is ever written to it."""

    def __init__(self, program: Program):
        self.program = program
        self.buffers: list[Axes] = [NONE] * len(program.buffers)
        self.decided: dict[int, Axes] = {id(b): NONE for _, b in walk(program.code) if isinstance(b, Loop | While | Switch)}
        self.grew = True
        for port in program.inputs:
            self._add(port.buffer, cut_axes(port))

    def blocks(self, code: tuple[Block, ...], around: Axes) -> None:
        """around: along which axes chips may differ in whether they run these."""
        for block in code:
            self._block(block, around)

    def _block(self, block: Block, around: Axes) -> None:
        match block:
            case Kernel():
                read = NONE.union(*(self.buffers[b] for b in _read(block)))
                for b in _written(block):
                    self._add(b, read | around)
            case Infeed():
                self._add(block.buffer, cut_axes(self.program.infeeds[block.port]) | around)
            case Position():
                self._add(block.buffer, frozenset((block.axis,)) | around)
            case Collective():
                sent, axes = self.buffers[block.source] | around, frozenset(block.axes)
                self._add(block.target, sent - axes if KINDS[block.kind].alike else sent | axes)
            case Loop() | While() | Switch():
                self._control(block, around)
            case Outfeed() | Await():
                pass

    def _control(self, block: Loop | While | Switch, around: Axes) -> None:
        number = block.trips if isinstance(block, Loop) else block.predicate if isinstance(block, While) else block.index
        inside = around | self.buffers[number]
        self.decided[id(block)] |= inside
        lists = block.branches if isinstance(block, Switch) else (block.body,)
        if isinstance(block, While):
            lists = (block.condition, block.body)
        for code in lists:
            self.blocks(code, inside)

    def _add(self, buffer: int, axes: Set[int]) -> None:
        if not axes <= self.buffers[buffer]:
            self.buffers[buffer] |= axes
            self.grew = True


def _read(kernel: Kernel) -> Iterator[int]:
    """Buffers that a kernel reads, those that it updates too."""
    for instruction in kernel.instructions:
        yield from (w.buffer for role, w in instruction.windows() if role == "read" or instruction.has("updates"))


def _written(kernel: Kernel) -> Iterator[int]:
    return (w.buffer for i in kernel.instructions for role, w in i.windows() if role == "write")
