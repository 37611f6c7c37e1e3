"""The work of a launch: tile instructions executed, in closed form from grids and trip counts, and the budget that limits it.

Loops whose trip count depends on data (while loops, and counted loops whose count is computed) are not in the closed form: the engines add
the work of each of their trips as they run it, and stop when the sum exceeds the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpuflow.device.timing.trips import known_trips
from tpuflow.isa.collectives import Await, Collective, Position
from tpuflow.isa.loop_nest import LoopNest
from tpuflow.isa.program import Block, CallHost, Copy, Infeed, Kernel, Loop, Moving, Outfeed, Program, Switch, While, walk

SCALE = 2**29  # a limit is counted in this many units at most, so that the fast engine can count in s32


@dataclass(frozen=True, slots=True)
class Work:
    """Tile instructions: `least`, of all that is known before the launch; `trips`, of one trip of each of the `dynamic_loops`."""

    least: int
    trips: tuple[int, ...]


class OutOfBudget(Exception):
    """A run was stopped because its work exceeds its budget."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The `limit` on the work of a launch, the `start` value of its count, and the work of one trip of each of the `dynamic_loops`, in
    units that fit in s32."""

    limit: int
    start: int
    trips: tuple[int, ...]

    @staticmethod
    def of(work: Work, limit: int) -> Budget:
        """The budget of a launch, in units such that the limit is at most `SCALE`; anything above the limit is clipped to limit + 1."""
        unit = -(-limit // SCALE) or 1
        top = limit // unit

        def units(n: int) -> int:
            return min(-(-n // unit), top + 1)

        return Budget(top, units(work.least), tuple(map(units, work.trips)))

    def array(self) -> np.ndarray:
        """s32 [2 + blocks of `dynamic_loops`]: limit, start, trips."""
        return np.asarray((self.limit, self.start, *self.trips), np.int32)


class Workload:
    """The closed form of a Program's work.

    `dynamic_loops` are the loops with data-dependent trip counts, depth first; `numbers` are their indices in it, by the block's id.
    """

    def __init__(self, program: Program):
        self.code = program.code
        constants, self._inputs = _sources(program)
        self._constants = constants
        self.dynamic_loops = [block for _, block in walk(program.code) if self._is_dynamic(block)]
        self.numbers: dict[int, list[int]] = {}
        for n, block in enumerate(self.dynamic_loops):
            self.numbers.setdefault(id(block), []).append(n)
        self._found: dict[tuple[int, ...], Work] = {}
        self.trip_inputs = tuple(sorted(set(self._inputs.values())))
        """Numbers of the inputs that are trip counts."""

    def work(self, inputs: Sequence[Any]) -> Work:
        """The work of a launch with these input arrays."""
        values = tuple(int(np.asarray(inputs[n])) for n in self.trip_inputs)
        if values not in self._found:
            self._found = {values: self._count(dict(zip(self.trip_inputs, values, strict=True)))}
        return self._found[values]

    def _is_dynamic(self, block: Block) -> bool:
        known = isinstance(block, Loop) and (block.trips in self._constants or block.trips in self._inputs)
        return isinstance(block, While | Loop) and not known

    def _count(self, values: Mapping[int, int]) -> Work:
        trips = [0] * len(self.dynamic_loops)
        least = _Count(self, values, trips).blocks(self.code)
        return Work(least, tuple(trips))

    def trips_of(self, block: Loop, values: Mapping[int, int]) -> int:
        """Trips of a loop that is not dynamic; values: of the inputs that are trip counts."""
        found = self._constants[block.trips] if block.trips in self._constants else values[self._inputs[block.trips]]
        return max(0, found)


def _sources(program: Program) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """(known trip counts, by buffer; the inputs that are trip counts and whose buffers nothing writes, by buffer)."""
    blocks = [block for _, block in walk(program.code)]
    counts = {block.trips for block in blocks if isinstance(block, Loop)}
    if not counts:
        return {}, {}
    written = {w.buffer for b in blocks if isinstance(b, Kernel) for i in b.instructions for role, w in i.windows() if role == "write"}
    written |= {b.buffer for b in blocks if isinstance(b, Infeed | Position)} | {b.target for b in blocks if isinstance(b, Moving)}
    written |= {target for b in blocks if isinstance(b, CallHost) for target in b.targets}
    inputs = {p.buffer: n for n, p in enumerate(program.inputs) if p.buffer in counts - written}
    return known_trips(program), inputs


@dataclass(frozen=True, slots=True)
class _Count:
    """One walk over the blocks. values: of the inputs that are trip counts; trips: filled with the work of a trip of each dynamic loop."""

    of: Workload
    values: Mapping[int, int]
    trips: list[int]

    def blocks(self, code: Sequence[Block]) -> int:
        """Instructions of blocks that run once, and one for each block."""
        return sum(1 + _WORK[type(block)](self, block) for block in code)

    def kernel(self, block: Kernel) -> int:
        """Sections times the grid."""
        nest = LoopNest(block.grid)
        return sum(nest.runs(name) * len(section) for name, section in block.sections)

    def loop(self, block: Loop | While) -> int:
        """The work of all trips; 0 for a dynamic loop, whose trips are counted as they run."""
        condition = block.condition if isinstance(block, While) else ()
        trip = 1 + self.blocks(condition) + self.blocks(block.body)
        numbers = self.of.numbers.get(id(block))
        if numbers is None:
            assert isinstance(block, Loop)
            return self.of.trips_of(block, self.values) * trip
        for n in numbers:
            self.trips[n] = trip
        return 0

    def switch(self, block: Switch) -> int:
        """The longest branch."""
        return max(map(self.blocks, block.branches))

    def alone(self, block: Block) -> int:
        """Nothing but the block itself."""
        return 0


_WORK: Mapping[type, Callable[..., int]] = {
    Kernel: _Count.kernel, Loop: _Count.loop, While: _Count.loop, Switch: _Count.switch,
    **dict.fromkeys((Infeed, Outfeed, Position, Collective, Await, Copy, CallHost), _Count.alone),
}  # fmt: skip
