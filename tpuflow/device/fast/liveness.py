"""Liveness of buffers over the blocks of a Program: what an XLA loop must carry, what an executable takes and gives, and what is dead."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import assert_never

from tpuflow.isa.collectives import Await, Collective, Position
from tpuflow.isa.program import Block, CallHost, Copy, Infeed, Kernel, Loop, Outfeed, Switch, While, children

NONE: frozenset[int] = frozenset()

Key = int | tuple[str, int]
"""A value that a loop carries, or that one executable hands to the next: a buffer, the state of a port ("taken" | "sent" | "outfeed",
port), or one of those below."""
WORK: Key = ("work", 0)
"""The work done so far, in units of the launch's budget."""
AGAIN: Key = ("again", 0)
"""Whether a while loop that is launched in slices has more trips."""
CALLED: Key = ("called", 0)
"""A token that every host call takes from the one before it and gives to the next, so that they are made in order."""
ACTIVE: Key = ("active", 0)
"""Whether a chip runs what it is in, of several that may not; no block hands it on."""


def reads(block: Block) -> frozenset[int]:
    """Buffers that one block reads itself (nested blocks not counted)."""
    match block:
        case Kernel():
            return _accesses(block)[0]
        case Loop():
            return frozenset((block.trips,))
        case While():
            return frozenset((block.predicate,))
        case Switch():
            return frozenset((block.index,))
        case Outfeed():
            return frozenset((block.buffer,))
        case Collective():
            return frozenset((block.source,))
        case Copy():  # of an item the rest of what it is written to stays
            return frozenset((block.source, *((block.index, block.target) if block.index >= 0 else ())))
        case CallHost():
            return frozenset(block.sources)
        case Infeed() | Position() | Await():
            return frozenset()
    assert_never(block)


def _accesses(kernel: Kernel) -> tuple[frozenset[int], frozenset[int]]:
    """The buffers that a kernel reads, and those it writes; one that is updated is both."""
    found: dict[str, set[int]] = {"read": set(), "write": set()}
    for instruction in kernel.instructions:
        updates = instruction.has("updates")
        for role, window in instruction.windows() if instruction.windowed else ():
            found[role].add(window.buffer)
            if updates:
                found["read"].add(window.buffer)
    return frozenset(found["read"]), frozenset(found["write"])


def writes(block: Block) -> frozenset[int]:
    """Buffers that one block writes itself."""
    match block:
        case Kernel():
            return _accesses(block)[1]
        case Infeed() | Position():
            return frozenset((block.buffer,))
        case Collective() | Copy():
            return frozenset((block.target,))
        case CallHost():
            return frozenset(block.targets)
        case Loop() | While() | Switch() | Outfeed() | Await():
            return frozenset()
    assert_never(block)


@dataclass(frozen=True, slots=True)
class Flow:
    """The transfer function of code: live before it are `gens`, and what is live after it and not in `kills`.

    Any number of trips of a loop has such a function too, so one pass over the code finds it.
    """

    gens: frozenset[int] = NONE
    kills: frozenset[int] = NONE

    def before(self, after: Set[int]) -> frozenset[int]:
        """The buffers that are live before the code."""
        return frozenset((after - self.kills) | self.gens)


@dataclass(frozen=True, slots=True)
class Uses:
    """What a block and everything nested in it touches: buffers written, buffers read or written, ports; whether its trips are counted,
    and whether it calls the host."""

    written: frozenset[int]
    touched: frozenset[int]
    infeeds: frozenset[int]
    outfeeds: frozenset[int]
    counted: bool
    calls: bool

    def state(self) -> tuple[Key, ...]:
        """The keys of its ports, of the work done, and of calls of the host."""
        ports = [*(("taken", p) for p in sorted(self.infeeds)), *((kind, p) for kind in ("sent", "outfeed") for p in sorted(self.outfeeds))]
        return (*ports, *((WORK,) if self.counted else ()), *((CALLED,) if self.calls else ()))


@dataclass(frozen=True, slots=True)
class Step:
    """A block of a list, with those of the buffers it touches that are live after it (`after`), that later blocks of the same list read
    (`read`), and that are dead after it (`dead`)."""

    block: Block
    after: frozenset[int]
    read: frozenset[int]
    dead: frozenset[int]


class Liveness:
    """The liveness of a Program's buffers; each block is analysed once.

    whole: the buffers that each kernel (by its id) overwrites completely, so that their old content is dead before it. counted: the ids of
    loops whose trips are counted as they run.
    """

    def __init__(self, whole: Mapping[int, frozenset[int]], counted: Container[int] = ()):
        self._whole, self._counted = whole, counted
        self._flows: dict[int, Flow] = {}
        self._uses: dict[int, Uses] = {}

    def uses(self, block: Block) -> Uses:
        """What a block touches, nested blocks included."""
        if id(block) not in self._uses:
            ports, counted = (_port(block, Infeed), _port(block, Outfeed)), id(block) in self._counted
            written = writes(block)
            own = Uses(written, reads(block) | written, *ports, counted, isinstance(block, CallHost))
            self._uses[id(block)] = _together([own, *(self.uses(b) for _, code in children(block) for b in code)])
        return self._uses[id(block)]

    def uses_of(self, code: Iterable[Block]) -> Uses:
        """What blocks touch."""
        return _together([self.uses(block) for block in code])

    def at_head(self, block: Loop | While, after: Set[int]) -> frozenset[int]:
        """The buffers that are live at the head of a loop, after it, or between condition and body of a trip."""
        tested = NONE if isinstance(block, Loop) else self.flow(block.body).gens | {block.predicate}
        return frozenset(after | self.of(block).gens | tested)

    def carried(self, block: Loop | While, after: Set[int]) -> tuple[int, ...]:
        """The buffers that a loop carries from trip to trip: those it writes that are live, and a while's predicate."""
        predicate = NONE if isinstance(block, Loop) else reads(block)
        return tuple(sorted((self.uses(block).written | predicate) & self.at_head(block, after)))

    def flow(self, code: Iterable[Block]) -> Flow:
        """The transfer function of a list of blocks."""
        gens: set[int] = set()
        kills: set[int] = set()
        for block in reversed(tuple(code)):
            flow = self.of(block)
            gens -= flow.kills
            gens |= flow.gens
            kills |= flow.kills
        return Flow(frozenset(gens), frozenset(kills))

    def of(self, block: Block) -> Flow:
        """The transfer function of a block."""
        if id(block) not in self._flows:
            self._flows[id(block)] = _FLOWS[type(block)](self, block)
        return self._flows[id(block)]

    def steps(self, code: tuple[Block, ...], after: Set[int]) -> list[Step]:
        """The blocks in order; after: the buffers that are live at the end."""
        need, read = set(after), set[int]()
        found: list[Step] = []
        for block in reversed(code):
            touched, flow = self.uses(block).touched, self.of(block)
            found.append(Step(block, touched & need, touched & read, touched - need))
            for needed in (need, read):
                needed -= flow.kills
                needed |= flow.gens
        return found[::-1]

    def _kernel(self, block: Kernel) -> Flow:
        return Flow(reads(block), self._whole[id(block)])

    def _loop(self, block: Loop) -> Flow:
        return Flow(self.flow(block.body).gens | reads(block))

    def _while(self, block: While) -> Flow:
        condition = self.flow(block.condition)
        return Flow(condition.before(reads(block) | self.flow(block.body).gens), condition.kills)

    def _switch(self, block: Switch) -> Flow:
        flows = [self.flow(branch) for branch in block.branches]
        return Flow(reads(block).union(*(f.gens for f in flows)), frozenset.intersection(*(f.kills for f in flows)))

    def _whole_buffers(self, block: Block) -> Flow:
        return Flow(reads(block), writes(block))


_FLOWS: Mapping[type, Callable[..., Flow]] = {
    Kernel: Liveness._kernel, Loop: Liveness._loop, While: Liveness._while, Switch: Liveness._switch,
    **dict.fromkeys((Infeed, Outfeed, Position, Collective, Await, Copy, CallHost), Liveness._whole_buffers),
}  # fmt: skip


def _together(uses: Sequence[Uses]) -> Uses:
    written, touched, infeeds, outfeeds = (
        NONE.union(*(getattr(u, name) for u in uses)) for name in ("written", "touched", "infeeds", "outfeeds")
    )
    return Uses(written, touched, infeeds, outfeeds, any(u.counted for u in uses), any(u.calls for u in uses))


def _port(block: Block, kind: type[Infeed] | type[Outfeed]) -> frozenset[int]:
    return frozenset((block.port,)) if isinstance(block, kind) else NONE
