"""Where a Program is cut into XLA executables, so that no launch of one takes long: at its outermost loops, or inside of loops whose
single trips are long.

The cuts follow from the Program alone, never from how long anything took: the same Program is always the same executables, and in how many
slices the trips of a loop are launched changes no bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tpuflow.device.fast.liveness import AGAIN, Key, Liveness
from tpuflow.device.timing.trips import known_trips
from tpuflow.device.work import work
from tpuflow.isa.collectives import chips_of
from tpuflow.isa.program import Block, Loop, Program, While

SHORT = 2.0**24
"""Work (`tpuflow.device.work`) that a host is done with in a fraction of a second: what has no more is neither cut nor waited for."""
LONG_TRIP = 2.0**31
"""Work of a trip that takes a host seconds: the host itself goes round a loop of such trips, and cuts the loops inside of them."""


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
    """A loop that the host goes round itself: `body` is run in each trip; of a while `condition` before each."""

    block: Loop | While
    after: frozenset[int]
    fills: tuple[int, ...]
    body: tuple[Segment, ...]
    condition: tuple[Segment, ...] = ()


Segment = Stage | Driven


@dataclass
class Cuts:
    """The segments of a verified Program."""

    program: Program
    liveness: Liveness
    divergent: frozenset[int] = frozenset()
    """Ids of blocks with divergent control (`Lanes.divergent`), which are never cut: chips may run different numbers of trips."""

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
        return self._is_short(self.program.code) and not self.liveness.uses_of(self.program.code).counted

    def segments(self) -> tuple[Segment, ...]:
        """All of it, in order."""
        outputs = frozenset(p.buffer for p in self.program.outputs)
        found = self._code(self.program.code, outputs, last=True)
        return found if found else (self._row((), outputs, final=True),)

    # ---- where

    def _is_short(self, blocks: Sequence[Block]) -> bool:
        return chips_of(self.program.mesh) * work(blocks, self.trips, float("inf")) <= SHORT

    def _is_cut(self, block: Block) -> bool:
        return isinstance(block, Loop | While) and id(block) not in self.divergent and not self._is_short((block,))

    def _is_driven(self, block: Loop | While) -> bool:
        inside = block.body + (block.condition if isinstance(block, While) else ())
        return any(map(self._is_cut, inside)) and chips_of(self.program.mesh) * work(inside, self.trips, 1.0) > LONG_TRIP

    # ---- into what

    def _code(self, code: tuple[Block, ...], after: frozenset[int], *, last: bool = False) -> tuple[Segment, ...]:
        later = self._later(code, after)
        found: list[Segment] = []
        row: list[Block] = []
        for number, block in enumerate(code):
            if number not in later:
                row.append(block)
                continue
            assert isinstance(block, Loop | While)
            if row:
                found.append(self._row(tuple(row), self.liveness.of(block).before(later[number])))
            row = []
            found.append(self._driven(block, later[number]) if self._is_driven(block) else self._sliced(block, later[number]))
        if row:
            found.append(self._row(tuple(row), after, final=last))
        return tuple(found)

    def _later(self, code: tuple[Block, ...], after: frozenset[int]) -> Mapping[int, frozenset[int]]:
        """The buffers that matter after each block that is cut, by its number."""
        need, found = set(after), {}
        for number in reversed(range(len(code))):
            if self._is_cut(code[number]):
                found[number] = frozenset(need)
            flow = self.liveness.of(code[number])
            need -= flow.kills
            need |= flow.gens
        return found

    def _row(self, blocks: tuple[Block, ...], after: frozenset[int], *, final: bool = False) -> Stage:
        uses = self.liveness.uses_of(blocks)
        touched = uses.touched | (after if final else frozenset())
        takes = (*sorted(self.liveness.flow(blocks).before(after) & touched & self._there), *uses.state())
        gives = () if final else tuple(sorted(uses.written & after))
        overwritten = self._donated | (after & self._owned) if final else self._owned & set(gives)
        donates = {k for k in takes if not isinstance(k, int) or k in overwritten}
        self._there |= set(gives)
        self._owned |= set(gives)
        return Stage(blocks, after, takes, (*gives, *uses.state()), frozenset(donates), final=final)

    def _carried(self, block: Loop | While, after: frozenset[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(the buffers that a loop carries, those of them that nothing wrote before, or whose old content nobody needs)."""
        carried, needed = self.liveness.carried(block, after), self.liveness.of(block).before(after)
        fills = tuple(k for k in carried if k not in self._there or k not in needed)
        self._there |= set(carried)
        self._owned |= set(carried)
        return carried, fills

    def _sliced(self, block: Loop | While, after: frozenset[int]) -> Stage:
        carried, fills = self._carried(block, after)
        uses = self.liveness.uses(block)
        read = tuple(sorted(self.liveness.at_head(block, after) & self._there & uses.touched - set(carried)))
        gives = (*carried, *uses.state())
        again = (AGAIN,) if isinstance(block, While) else ()
        return Stage((), after, (*carried, *read, *uses.state()), (*gives, *again), frozenset(gives), block, fills)

    def _driven(self, block: Loop | While, after: frozenset[int]) -> Driven:
        _, fills = self._carried(block, after)
        need = self.liveness.at_head(block, after)
        condition = self._code(block.condition, need) if isinstance(block, While) else ()
        return Driven(block, after, fills, self._code(block.body, need), condition)
