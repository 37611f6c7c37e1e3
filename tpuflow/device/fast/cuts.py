"""Where a Program is cut into XLA executables: at its outermost loops, or inside of loops whose single trips are long, so that no launch
of one takes long; and where straight code is long, so that no compilation does (`pieces`).

The cuts depend on the Program alone, never on measured time, so the same Program is always the same executables. Measured time decides only
in how many slices the trips of a loop are launched, which changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tpuflow.device.fast.liveness import AGAIN, Key, Liveness
from tpuflow.device.fast.pieces import pieces
from tpuflow.device.result_count import ResultCounts
from tpuflow.device.timing.trips import known_trips
from tpuflow.isa.collectives import chips_of
from tpuflow.isa.program import Block, Loop, Program, While

SHORT = 2.0**27
"""A count (`ResultCounts`) that takes the host tens of milliseconds, and the dearest special functions in bit-exact fidelity (20 ns each)
two or three seconds: blocks of no more than that are neither cut nor waited for. A launch in pieces costs the host 0.15 ms more than a
single executable: a tenth of a product of matrices of 512 x 512. An LSTM's loop of 30 ms takes a seventh longer if it is cut."""
LONG_TRIP = 2.0**31
"""A count (`ResultCounts`) that takes the host seconds: a loop of longer trips is run by the host (`HostLoop`), and loops in its body are
cut."""


@dataclass(frozen=True)
class Stage:
    """One XLA executable: consecutive `blocks`, or some trips of a `loop`.

    `takes` and `gives` are the keys (`liveness.Key`) of its arguments and results; the arguments `donates` may be overwritten. `after` are
    the buffers that are live after it. `fills` are buffers that a loop carries though nothing has written them: they are made before its
    first trip, as constants or zeros. The `final` stage returns the Program's outputs as well, port by port. One that is `continued` is a
    piece of straight code, and the next stage the piece after it: the two are launched together.
    """

    blocks: tuple[Block, ...]
    after: frozenset[int]
    takes: tuple[Key, ...]
    gives: tuple[Key, ...]
    donates: frozenset[Key]
    loop: Loop | While | None = None
    fills: tuple[int, ...] = ()
    final: bool = False
    continued: bool = False


@dataclass(frozen=True)
class HostLoop:
    """A loop that the host runs: in each trip it launches the segments of `body`, of a while those of `condition` before it."""

    block: Loop | While
    after: frozenset[int]
    fills: tuple[int, ...]
    body: tuple[Segment, ...]
    condition: tuple[Segment, ...] = ()


Segment = Stage | HostLoop


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
        self._counts = ResultCounts(self.program, known_trips(self.program))

    @cached_property
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
        return chips_of(self.program.mesh) * self._counts.of(blocks, float("inf")) <= SHORT

    def _is_cut(self, block: Block) -> bool:
        return isinstance(block, Loop | While) and id(block) not in self.divergent and not self._is_short((block,))

    def _is_host_loop(self, block: Loop | While) -> bool:
        inside = block.body + (block.condition if isinstance(block, While) else ())
        return any(map(self._is_cut, inside)) and chips_of(self.program.mesh) * self._counts.of(inside, 1.0) > LONG_TRIP

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
            found += self._rows(row, self.liveness.of(block).before(later[number]))
            row = []
            found.append(self._host_loop(block, later[number]) if self._is_host_loop(block) else self._sliced(block, later[number]))
        found += self._rows(row, after, final=last)
        return tuple(found)

    def _later(self, code: tuple[Block, ...], after: frozenset[int]) -> Mapping[int, frozenset[int]]:
        """The buffers that are live after each block that is cut, by the block's index."""
        need, found = set(after), {}
        for number in reversed(range(len(code))):
            if self._is_cut(code[number]):
                found[number] = frozenset(need)
            flow = self.liveness.of(code[number])
            need -= flow.kills
            need |= flow.gens
        return found

    def _rows(self, blocks: Sequence[Block], after: frozenset[int], *, final: bool = False) -> Iterator[Stage]:
        """Consecutive blocks in as many executables as pay."""
        left = tuple(blocks)
        for piece in pieces(left, self.program)[:-1] if not self._is_short(left) else []:
            left = left[len(piece) :]
            yield replace(self._row(tuple(piece), self.liveness.flow(left).before(after)), continued=True)
        if left:
            yield self._row(left, after, final=final)

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
        """(the buffers that a loop carries, its `fills`: those of them that nothing has written, or whose old content is dead)."""
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

    def _host_loop(self, block: Loop | While, after: frozenset[int]) -> HostLoop:
        _, fills = self._carried(block, after)
        need = self.liveness.at_head(block, after)
        condition = self._code(block.condition, need) if isinstance(block, While) else ()
        return HostLoop(block, after, fills, self._code(block.body, need), condition)
