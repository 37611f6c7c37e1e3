"""A Program with copies between HBM and the chip put in, and its kernels made to read and write what they reach there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tpuflow.isa.collectives import Await
from tpuflow.isa.instruction import Instruction
from tpuflow.isa.liveness import Timeline
from tpuflow.isa.program import Block, Copy, Kernel, Loop, Moving, Program, Switch, While, walk
from tpuflow.lower.stays import Site, Stay


@dataclass(frozen=True, slots=True)
class Placed:
    """What stays, and its address on the chip."""

    stay: Stay
    address: int


@dataclass(slots=True)
class _Between:
    """What goes between two blocks: waits for what began earlier; stores that are waited for at once, for what begins here may take their
    arrays' places; what begins, and waits for that."""

    before: list[Await] = field(default_factory=list)
    stores: list[Copy] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    after: list[Await] = field(default_factory=list)

    def blocks(self) -> tuple[Block, ...]:
        """All in order."""
        stored = (Await(copy.semaphore) for copy in self.stores)
        return (*self.before, *self.stores, *stored, *self.copies, *self.after)


def with_copies(program: Program, timeline: Timeline, placed: Sequence[Placed]) -> Program:
    """Arrays on the chip at their places. One with a copy is a buffer of its own there, behind all others."""
    buffers, names = list(program.buffers), list(program.buffer_names)
    between: dict[Site, _Between] = defaultdict(_Between)
    renamed: dict[str, dict[int, int]] = defaultdict(dict)
    semaphore = max((b.semaphore for _, b in walk(program.code) if isinstance(b, Moving)), default=-1)
    for p in placed:
        n, stay = p.stay.buffer, p.stay
        there = replace(program.buffers[n], address=p.address, space=program.chip.array_space)
        if stay.begins is None or stay.awaited is None:
            buffers[n] = there
            continue
        resident, semaphore = len(buffers), semaphore + 1
        buffers.append(there)
        names += [names[n]] if names else []
        for access in stay.accesses:
            renamed[timeline.places[access.tick]][n] = resident
        source, target = (n, resident) if stay.loads else (resident, n)
        here, at_once = between[stay.begins], stay.begins == stay.awaited
        (here.stores if at_once and not stay.loads else here.copies).append(Copy(source, target, semaphore))
        if stay.loads or not at_once:
            (here.after if at_once else between[stay.awaited].before).append(Await(semaphore))
    code = _List(between, renamed).blocks(program.code, "")
    return replace(program, buffers=tuple(buffers), buffer_names=tuple(names), code=code)


@dataclass(frozen=True, slots=True)
class _List:
    """Goes over lists of blocks: what goes between them, and which buffers kernels use in place of others, by their places."""

    between: Mapping[Site, _Between]
    renamed: Mapping[str, Mapping[int, int]]

    def blocks(self, code: Sequence[Block], path: str) -> tuple[Block, ...]:
        """A list with what goes in between."""
        made: list[Block] = []
        for i, block in enumerate(code):
            made += self._at(path, i)
            made.append(self._block(block, f"{path}{i}"))
        return (*made, *self._at(path, len(code)))

    def _at(self, path: str, position: int) -> tuple[Block, ...]:
        found = self.between.get((path, position))
        return () if found is None else found.blocks()

    def _block(self, block: Block, place: str) -> Block:
        match block:
            case Kernel():
                numbers = self.renamed.get(place)
                return block if numbers is None else _renumbered(block, numbers)
            case Loop():
                return replace(block, body=self.blocks(block.body, f"{place}.body."))
            case While():
                condition = self.blocks(block.condition, f"{place}.condition.")
                return replace(block, condition=condition, body=self.blocks(block.body, f"{place}.body."))
            case Switch():
                branches = enumerate(block.branches)
                return replace(block, branches=tuple(self.blocks(b, f"{place}.branch{i}.") for i, b in branches))
        return block


def _renumbered(kernel: Kernel, numbers: Mapping[int, int]) -> Kernel:
    """A kernel on other buffers."""
    sections = {name: tuple(_on_others(i, numbers) for i in section) for name, section in kernel.sections}
    return replace(kernel, **sections)


def _on_others(instruction: Instruction, numbers: Mapping[int, int]) -> Instruction:
    windows = {name: w for name, _ in instruction.windowed if (w := getattr(instruction, name)).buffer in numbers}
    record: Any = instruction
    return replace(record, **{name: w.on(numbers[w.buffer]) for name, w in windows.items()}) if windows else instruction
