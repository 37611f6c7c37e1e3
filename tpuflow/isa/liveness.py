"""When each buffer of a Program is needed, found from the accesses of its blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from tpuflow.isa.collectives import Await, Collective, Position
from tpuflow.isa.program import Block, CallHost, Copy, Infeed, Kernel, Loop, Moving, Outfeed, Program, Switch, While, children


class Timeline:
    """Goes over the blocks of a Program; a tick is one block that does something, loops count once.

    `places` and `blocks` have each tick's place in the Program and its block, `spans` the first and last tick of every buffer that is
    used, `makers` the block that first touches a buffer which is neither input nor constant (of a copy: its source's), with the source
    line of that.

    A buffer that a loop finds already there stays until the loop ends, for the next trip may need it.
    """

    def __init__(self, program: Program) -> None:
        self.places: list[str] = []
        self.blocks: list[Block] = []
        self.makers: dict[int, tuple[Block, str]] = {}
        self.spans: dict[int, tuple[int, int]] = {p.buffer: (0, 0) for p in program.inputs}
        self.spans |= {c.buffer: (0, 0) for c in program.constants}
        self._started: dict[int, Moving] = {}
        self._list(program.code, "")

    def _list(self, code: Sequence[Block], path: str) -> None:
        for i, block in enumerate(code):
            self._block(block, f"{path}{i}")

    def _block(self, block: Block, place: str) -> None:
        self._tick(block, place)
        start = len(self.places)
        for name, nested in children(block):
            self._list(nested, f"{place}.{name}.")
        if isinstance(block, Loop | While):
            self._stay(start)

    def _stay(self, start: int) -> None:
        end = len(self.places) - 1
        for buffer, (first, last) in self.spans.items():
            if first < start <= last:
                self.spans[buffer] = first, end

    def _tick(self, block: Block, place: str) -> None:
        now = len(self.places)
        self.places.append(place)
        self.blocks.append(block)
        if isinstance(block, Moving):
            self._started[block.semaphore] = block
        for buffer, source in touched(self._started[block.semaphore] if isinstance(block, Await) else block):
            if buffer not in self.spans:
                self.spans[buffer] = now, now
                made = block, source
                self.makers[buffer] = self.makers.get(block.source, made) if isinstance(block, Copy) else made
            self.spans[buffer] = self.spans[buffer][0], now


def touched(block: Block) -> Iterator[tuple[int, str]]:
    """The buffers that a block itself reads or writes, each with the source line of that; writes come first."""
    match block:
        case Kernel():
            lines = itertools.chain(block.sources, itertools.repeat(""))
            moves = [(i, line) for i, line in zip(block.instructions, lines, strict=False) if i.windowed]
            used = [(role, w.buffer, line) for i, line in moves for role, w in i.windows()]
            yield from ((buffer, line) for _, buffer, line in sorted(used, key=lambda u: u[0] != "write"))
        case Loop():
            yield block.trips, ""
        case While():
            yield block.predicate, ""
        case Switch():
            yield block.index, ""
        case Infeed() | Outfeed() | Position():
            yield block.buffer, ""
        case CallHost():
            yield from ((buffer, "") for buffer in (*block.targets, *block.sources))
        case Collective():
            yield block.target, block.where
            yield block.source, block.where
        case Copy():
            yield from ((buffer, "") for buffer in (block.target, block.source, block.index) if buffer >= 0)
