"""A kernel's grid in time: the busiest core's share of its points, one after the other, with repeating periods added up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tpuflow.device.timing.calibration import Machine
from tpuflow.device.timing.prices import LOAD, MOVE, SIGNAL, STORE, WAIT, Clock, Edges, Op, PricedKernel, Table
from tpuflow.device.timing.schedule import Core, Touched, repeat
from tpuflow.isa.core_shares import divide_kernel
from tpuflow.isa.program import SECTIONS

PROLOGUE, BODY, EPILOGUE = range(len(SECTIONS))


@dataclass(frozen=True, slots=True)
class GridPlan:
    """All that a kernel's time depends on: its grid, and the cost of every instruction of its sections at each combination of edges.

    It is the key of the cache of kernel times: kernels that differ only in buffers and addresses have equal plans.
    """

    grid: tuple[tuple[int, bool], ...]  # size and whether sequential
    ragged: tuple[int, ...]
    semaphores: tuple[int, ...]
    sections: tuple[Table, ...]
    points: int  # of the busiest core
    steps: int  # of each of these that it does itself
    combine: int  # picoseconds to add a core's piece of the partial sum of one step that another core ran
    collect: int  # picoseconds to gather the pieces of a point on one core

    @property
    def combined(self) -> int:
        """Picoseconds in which a core adds the partial sums of other cores."""
        every = math.prod(size for size, sequential in self.grid if sequential)
        return self.points * (every - self.steps) * self.combine


def plan_grid(priced: PricedKernel, machine: Machine) -> tuple[GridPlan, Clock]:
    """The plan of a priced kernel for the core that has most to do, and that core's clock."""
    kernel = priced.kernel
    division, sums = divide_kernel(kernel, machine.chip)
    clock = Clock(machine, division.cores)
    sections = tuple(
        tuple(
            (p.ragged_axes, tuple((bits, clock.op(p.instruction, cost, p.reads, pipelined=p.pipelined)) for bits, cost in p.costs.items()))
            for p in section
        )
        for section in priced.sections
    )
    grid = tuple((g.size, g.kind == "sequential") for g in kernel.grid)
    combine = clock.cycles(sums.cycles) + clock.bus(sums.piece_bytes)
    collect = clock.bus(sums.collected_bytes)
    return GridPlan(grid, priced.ragged, kernel.semaphores, sections, division.points, division.steps, combine, collect), clock


def grid_time(plan: GridPlan, *, unroll: bool = False) -> int:
    """Picoseconds from the start of the kernel to the last completion; `unroll` runs every single trip instead of adding periods."""
    return GridRun(plan, unroll).time()


class GridRun:
    """One walk over a plan's grid."""

    def __init__(self, plan: GridPlan, unroll: bool):
        self.plan, self.unroll = plan, unroll
        self.points = [i for i, (_, sequential) in enumerate(plan.grid) if not sequential]
        self.steps = [i for i, (_, sequential) in enumerate(plan.grid) if sequential]
        self.index = [0] * len(plan.grid)
        self.ops: dict[tuple[int, Edges], tuple[Op, ...]] = {}
        first = [tuple(table[0][1] for _, table in section) for section in plan.sections]
        every = [op for section in first for op in section]
        self.core = Core(plan.semaphores, {op[3]: op[1] for op in every if op[0] == WAIT})
        self.touched_point, self.touched_step = Touched.by(*first), Touched.by(first[BODY])
        self.next_point = {d: _paths(d, first, ((PROLOGUE, BODY, EPILOGUE),)) for d in (LOAD, STORE)}
        self.next_step = {d: _paths(d, first, ((BODY,), (EPILOGUE, PROLOGUE, BODY))) for d in (LOAD, STORE)}

    def time(self) -> int:
        """Run it."""
        if not all(size for size, _ in self.plan.grid):
            return 0
        self._nest(self.points, self.plan.points, self._point, self.touched_point, self._point_floors)
        received = self.plan.combined
        return max(self.core.end, received) + (self.plan.combine + self.plan.collect if received else 0)

    def _nest(self, axes: Sequence[int], share: int, inside, touched: Touched, floors) -> None:
        """The first `share` trips of a nest of axes, in order."""
        if not axes:
            inside()
            return
        axis, inner = axes[0], math.prod(self.plan.grid[a][0] for a in axes[1:])
        size = self.plan.grid[axis][0]
        whole, rest = divmod(share, inner)
        same = min(whole, size - 1) if axis in self.plan.ragged else whole

        def trip(trips: int = inner) -> None:
            self._nest(axes[1:], trips, inside, touched, floors)

        self.index[axis] = 0
        repeat(self.core, same, trip, touched, None if self.unroll else floors)
        self.index[axis] = size - 1
        for _ in range(whole - same):
            trip()
        if rest:
            self.index[axis] = whole
            trip(rest)
        self.index[axis] = 0

    def _point(self) -> None:
        self._section(PROLOGUE)
        self._nest(self.steps, self.plan.steps, self._step, self.touched_step, self._step_floors)
        for axis in self.steps:
            self.index[axis] = self.plan.grid[axis][0] - 1
        self._section(EPILOGUE)
        for axis in self.steps:
            self.index[axis] = 0

    def _step(self) -> None:
        self._section(BODY)

    def _section(self, section: int) -> None:
        bits = tuple(self.index[a] == self.plan.grid[a][0] - 1 for a in self.plan.ragged)
        ops = self.ops.get((section, bits))
        if ops is None:
            ops = tuple(dict(table)[tuple(bits[i] for i in ragged_axes)] for ragged_axes, table in self.plan.sections[section])
            self.ops[section, bits] = ops
        self.core.run(ops)

    def _point_floors(self) -> dict[int, int]:
        return {d: self._floor(paths) for d, paths in self.next_point.items()}

    def _step_floors(self) -> dict[int, int]:
        return {d: self._floor(paths) for d, paths in self.next_step.items()}

    def _floor(self, paths: tuple[Path, ...]) -> int:
        """A lower bound on the start of a direction's next move, over all paths to it."""
        return min((self.core.earliest(path) for path in paths), default=self.core.end)


Path = tuple[Op, ...]
"""Instructions up to and including the first move of one direction."""


def _paths(direction: int, sections: Sequence[Sequence[Op]], orders: Sequence[Sequence[int]]) -> tuple[Path, ...]:
    """For each order of sections, the path to the first move of a direction, if there is one."""
    found = []
    for order in orders:
        ops = [op for section in order for op in sections[section]]
        ends = [i for i, op in enumerate(ops) if op[0] == MOVE and op[1] == direction]
        if ends:
            found.append((*(op for op in ops[: ends[0]] if op[0] in (SIGNAL, WAIT)), ops[ends[0]]))
    return tuple(found)
