"""A Program with copies between HBM and the chip put in, and its blocks made to read and write what they reach there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tpuflow.isa.collectives import Await, Collective, Position
from tpuflow.isa.liveness import Timeline, touched
from tpuflow.isa.program import Block, CallHost, Copy, Kernel, Loop, Moving, Program, Switch, While, walk
from tpuflow.lower.stays import Site, Stay

Role = tuple[str, str]
"""A kernel's place, and whether it reads or writes."""


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


def with_copies(program: Program, timeline: Timeline, placed: Sequence[Placed], replaced: Sequence[tuple[int, int]] = ()) -> Program:
    """Arrays on the chip at their places. One with a copy is a buffer of its own there, behind all others.

    The buffers of each pair in `replaced` (`MemoryPlan`) are made one where both are still in HBM at the kernel that they have in common.
    """
    numbers = _numbers(program, timeline, placed, replaced)
    kept = sorted(set(numbers))
    places = {n: i for i, n in enumerate(kept)}
    final = [places[n] for n in numbers]
    buffers, names = [program.buffers[n] for n in kept], [program.buffer_names[n] for n in kept if program.buffer_names]
    between: dict[Site, _Between] = defaultdict(_Between)
    renamed: dict[Role, dict[int, int]] = defaultdict(dict)
    semaphore = max((b.semaphore for _, b in walk(program.code) if isinstance(b, Moving)), default=-1)
    for p in placed:
        n, stay = final[p.stay.buffer], p.stay
        there = replace(buffers[n], address=p.address, space=program.chip.array_space)
        if stay.begins is None or stay.awaited is None:
            buffers[n] = there
            continue
        resident, semaphore = len(buffers), semaphore + 1
        buffers.append(there)
        names += [names[n]] if names else []
        for access in stay.accesses:
            for role in ("read",) if stay.loads else ("read", "write"):
                renamed[timeline.places[access.tick], role][p.stay.buffer] = resident
        source, target = (n, resident) if stay.loads else (resident, n)
        here, at_once = between[stay.begins], stay.begins == stay.awaited
        (here.stores if at_once and not stay.loads else here.copies).append(Copy(source, target, semaphore))
        if stay.loads or not at_once:
            (here.after if at_once else between[stay.awaited].before).append(Await(semaphore))
    changed = {n: i for n, i in enumerate(final) if n != i}
    code = _List(between, renamed, changed).blocks(program.code, "")
    return replace(program, buffers=tuple(buffers), buffer_names=tuple(names), code=code)


def _numbers(program: Program, timeline: Timeline, placed: Sequence[Placed], replaced: Sequence[tuple[int, int]]) -> list[int]:
    """The buffer that each buffer becomes: itself, or one that it replaces. What the branches of a switch make in one buffer may replace
    another in each of them."""
    stays: dict[int, list[Stay]] = defaultdict(list)
    for p in placed:
        stays[p.stay.buffer].append(p.stay)

    def stays_there(buffer: int, first: int, last: int) -> bool:
        """Whether the chip has it from the first to the last of these ticks."""
        return any(s.begins is None or (s.accesses[0].tick <= first and last <= s.accesses[-1].tick) for s in stays[buffer])

    numbers = list(range(len(program.buffers)))

    def number(buffer: int) -> int:
        while numbers[buffer] != buffer:
            buffer = numbers[buffer]
        return buffer

    for old, new in replaced:
        common = timeline.spans[new][0], timeline.spans[old][1]
        if not stays_there(old, *common) and not stays_there(new, *common):
            one, other = sorted((number(old), number(new)))
            numbers[other] = one
    return [number(buffer) for buffer in numbers]


@dataclass(frozen=True, slots=True)
class _List:
    """Goes over lists of blocks: what goes between them, which buffers kernels read or write in place of others, by their places, and which
    buffers have other numbers everywhere else."""

    between: Mapping[Site, _Between]
    renamed: Mapping[Role, Mapping[int, int]]
    changed: Mapping[int, int]

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
                used, new = {b for b, _ in touched(block)}, self.changed
                for role in ("read", "write"):
                    here = self.renamed.get((place, role), {})
                    numbers = {b: here.get(b, new.get(b, b)) for b in used if b in here or b in new}
                    block = block.on(numbers, role) if numbers else block
                return block
            case Collective() | Copy() | Position() | CallHost():
                return self._elsewhere(block)
            case Loop():
                return replace(block, body=self.blocks(block.body, f"{place}.body."))
            case While():
                condition = self.blocks(block.condition, f"{place}.condition.")
                return replace(block, condition=condition, body=self.blocks(block.body, f"{place}.body."))
            case Switch():
                branches = enumerate(block.branches)
                return replace(block, branches=tuple(self.blocks(b, f"{place}.branch{i}.") for i, b in branches))
        return block

    def _elsewhere(self, block: Any) -> Block:
        """A block that is no kernel, and has no blocks inside of it, on other buffers."""
        used = {name: getattr(block, name) for name in _BUFFERS[type(block)]}
        return replace(block, **{name: self._changed(numbers) for name, numbers in used.items()}) if self.changed else block

    def _changed(self, numbers: int | tuple[int, ...]) -> int | tuple[int, ...]:
        if isinstance(numbers, int):
            return self.changed.get(numbers, numbers)
        return tuple(self.changed.get(n, n) for n in numbers)


_BUFFERS: Mapping[type, Sequence[str]] = {
    Collective: ("source", "target"),
    Copy: ("source", "target", "index"),
    Position: ("buffer",),
    CallHost: ("sources", "targets"),
}
"""The fields that name buffers; those that other blocks name are never made one with others."""
