"""Where a Program is cut into XLA executables, so that no launch of one takes long: at its outermost loops, or inside of loops whose
single trips are long.

The cuts follow from the Program alone, never from how long anything took: the same Program is always the same executables, and in how many
slices the trips of a loop are launched changes no bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tpuflow.device.fast import liveness
from tpuflow.device.timing.trips import known_trips
from tpuflow.device.work import work
from tpuflow.isa.program import Block, Infeed, Loop, Outfeed, Program, While, walk

SHORT = 2.0**24
"""Work (`tpuflow.device.work`) that a host is done with in a fraction of a second: what has no more is neither cut nor waited for."""
LONG_TRIP = 2.0**31
"""Work of a trip that takes a host seconds: the host itself goes round a loop of such trips, and cuts the loops inside of them."""

Key = int | tuple[str, int]
"""What crosses from one executable to the next: a buffer, or the state of a port: ("taken" | "sent" | "outfeed", port)."""


@dataclass(frozen=True)
class Stage:
    """One XLA executable: blocks in a row, or some trips of a `loop`.

    It takes the keys `takes`, of which it may overwrite `donates`, and gives `gives`; `after` are the buffers that matter when it is done.
    `fills` must be there before the first trip: what the loop carries though nothing wrote it, as zeros or constants. The `final` stage
    gives the Program's outputs, port by port, before its keys.
    """

    blocks: tuple[Block, ...]
    after: frozenset[int]
    takes: tuple[Key, ...]
    gives: tuple[Key, ...]
    donates: frozenset[Key]
    loop: Loop | While | None = None
    fills: tuple[int, ...] = ()
    final: bool = False


@dataclass(frozen=True)
class Driven:
    """A loop that the host goes round itself: `body` is run in each trip; of a while also `condition`, after each."""

    block: Loop | While
    after: frozenset[int]
    fills: tuple[int, ...]
    body: tuple[Segment, ...]
    condition: tuple[Segment, ...] = ()


Segment = Stage | Driven


@dataclass
class Cuts:
    """The segments of a verified Program. `whole` is as of `liveness.needed_before`."""

    program: Program
    whole: frozenset[tuple[int, int]]

    def __post_init__(self) -> None:
        self._donated = frozenset(p.buffer for p in self.program.inputs if p.donated)
        self._owned: set[int] = set(self._donated)
        self._there: set[int] = {p.buffer for p in self.program.inputs}

    @cached_property
    def trips(self) -> Mapping[int, int]:
        """The trip counts that the Program itself says."""
        return known_trips(self.program)

    @property
    def short(self) -> bool:
        """Whether the whole Program is known to be done soon."""
        return self._is_short(self.program.code)

    def segments(self) -> tuple[Segment, ...]:
        """All of it, in order."""
        outputs = frozenset(p.buffer for p in self.program.outputs)
        found = self._code(self.program.code, outputs, last=True)
        return found if found else (self._row((), outputs, final=True),)

    # ---- where

    def _is_short(self, blocks: Sequence[Block]) -> bool:
        return work(blocks, self.trips, float("inf")) <= SHORT

    def _is_cut(self, block: Block) -> bool:
        return isinstance(block, Loop | While) and not self._is_short((block,))

    def _is_driven(self, block: Loop | While) -> bool:
        inside = block.body + (block.condition if isinstance(block, While) else ())
        return any(map(self._is_cut, inside)) and work(inside, self.trips, 1.0) > LONG_TRIP

    # ---- into what

    def _code(self, code: tuple[Block, ...], after: frozenset[int], *, last: bool = False) -> tuple[Segment, ...]:
        need = liveness.needed_before(code, after, self.whole)
        found: list[Segment] = []
        row: list[Block] = []
        for block, before, later in zip(code, need, need[1:], strict=False):
            if not isinstance(block, Loop | While) or not self._is_cut(block):
                row.append(block)
                continue
            between = before
            if isinstance(block, While):  # its condition is computed once before the first trip, and after each
                between = self._at_condition(block, later)
                row += block.condition
            if row:
                found.append(self._row(tuple(row), between))
            row = []
            found.append(self._driven(block, later) if self._is_driven(block) else self._sliced(block, later))
        if row:
            found.append(self._row(tuple(row), after, final=last))
        return tuple(found)

    def _at_condition(self, block: While, after: frozenset[int]) -> frozenset[int]:
        """The buffers that matter right after a while's condition."""
        need = liveness.while_need(block, after, self.whole)
        return liveness.needed_before(block.body, need, self.whole)[0] | after | {block.predicate} | need

    def _row(self, blocks: tuple[Block, ...], after: frozenset[int], *, final: bool = False) -> Stage:
        ports, touched = _ports(blocks), _touched(blocks) | (after if final else frozenset())
        before = liveness.needed_before(blocks, after, self.whole)[0]
        takes = (*sorted(before & touched & self._there), *ports)
        gives = () if final else tuple(sorted(liveness.all_writes(blocks) & after))
        overwritten = self._donated | (after & self._owned) if final else self._owned & set(gives)
        donates = {k for k in takes if not isinstance(k, int) or k in overwritten}
        self._there |= set(gives)
        self._owned |= set(gives)
        return Stage(blocks, after, takes, (*gives, *ports), frozenset(donates), final=final)

    def _carried(self, block: Loop | While, after: frozenset[int]) -> tuple[frozenset[int], tuple[int, ...], tuple[int, ...]]:
        """(buffers that matter at the head of a loop, those of them that it writes, those of these that nothing wrote before)."""
        if isinstance(block, While):
            need, written = self._at_condition(block, after), liveness.all_writes(block.condition + block.body) | {block.predicate}
        else:
            need, written = liveness.loop_need(block.body, after, self.whole), liveness.all_writes(block.body)
        carried = tuple(sorted(written & need))
        fills = tuple(k for k in carried if k not in self._there)
        self._there |= set(carried)
        self._owned |= set(carried)
        return need, carried, fills

    def _sliced(self, block: Loop | While, after: frozenset[int]) -> Stage:
        need, carried, fills = self._carried(block, after)
        read = tuple(sorted(need & self._there & _touched((block,)) - set(carried)))
        ports = _ports((block,))
        gives = (*carried, *ports)
        return Stage((), after, (*carried, *read, *ports), gives, frozenset(gives), block, fills)

    def _driven(self, block: Loop | While, after: frozenset[int]) -> Driven:
        need, _, fills = self._carried(block, after)
        if isinstance(block, Loop):
            return Driven(block, after, fills, self._code(block.body, need))
        head = liveness.while_need(block, after, self.whole)
        return Driven(block, after, fills, self._code(block.body, head), self._code(block.condition, need))


def _touched(blocks: tuple[Block, ...]) -> frozenset[int]:
    """Buffers that are read or written anywhere inside."""
    return liveness.all_writes(blocks).union(*(liveness.reads(block) for _, block in walk(blocks)))


def _ports(blocks: tuple[Block, ...]) -> tuple[Key, ...]:
    """The state of the ports that are used anywhere inside."""
    inside = [block for _, block in walk(blocks)]
    taken = sorted({b.port for b in inside if isinstance(b, Infeed)})
    sent = sorted({b.port for b in inside if isinstance(b, Outfeed)})
    return (*(("taken", p) for p in taken), *((kind, p) for kind in ("sent", "outfeed") for p in sent))
