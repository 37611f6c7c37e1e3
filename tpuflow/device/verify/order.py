"""The semaphores of a kernel imply program order: a walk over a truncated grid with vector clocks.

The walk goes in program order. If every wait finds its semaphore above zero there, no schedule of the queues can end in a deadlock
(semaphores have one signaller and one waiter, so no queue can take what another needs); and if every pair of accesses that clash is
ordered by the clocks, every schedule gives the values of program order. Semaphores are balanced and slots repeat, so what holds for
the first full turn of all slots holds for the rest of the grid.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from tpuflow.chips.chip import Chip
from tpuflow.device.ordering import Cell, Clocks, Event, Fault, TileCells, read_order, write_order
from tpuflow.device.place import section_place, tile_text
from tpuflow.device.resolved import Resolved, ResolvedKernel
from tpuflow.device.verify.budget import VerifyBudget
from tpuflow.isa.instruction import Tile, Window
from tpuflow.isa.loop_nest import Iteration, LoopNest
from tpuflow.isa.occupancy import slot_span
from tpuflow.isa.program import GridAxis, Kernel
from tpuflow.isa.refusal import Refusal

MOST_TURNS = 64


def check_order(kernel: Kernel, found: ResolvedKernel, chip: Chip, in_place: Mapping[int, Window], effort: VerifyBudget) -> None:
    """Refuse a kernel in which a wait never fires, a tile is read that is not there, or two accesses clash without order.

    in_place: the window of every buffer that the kernel reads and writes.
    """
    nest = _truncated(kernel, found.tiles)
    if nest.points and (nest.steps or kernel.prologue or kernel.epilogue):
        effort.visit(_visits(found, chip, nest))
        _OrderCheck(kernel, found, chip, in_place).run(nest)


def _visits(found: ResolvedKernel, chip: Chip, nest: LoopNest) -> int:
    """Cells that the walk makes and looks at, all slots of a tile taken to be cut into as many as the most cut one."""
    edges: dict[str, list[int]] = {}
    for t in found.tiles:
        edges.setdefault(t.space, []).extend(edge for slot in range(t.slots) for edge in slot_span(t, slot, chip))
    cuts = {space: sorted(set(ends)) for space, ends in edges.items()}
    cells = [max(1, *_cuts_within(t, cuts[t.space], chip)) for t in found.tiles]
    made = sum(t.slots * n for t, n in zip(found.tiles, cells, strict=True))
    return made + sum(nest.runs(i.section) * (1 + sum(cells[n] for n in (*i.reads, *i.writes))) for i in found.instructions)


def _cuts_within(tile: Tile, cuts: Sequence[int], chip: Chip) -> Iterator[int]:
    spans = (slot_span(tile, slot, chip) for slot in range(tile.slots))
    return (bisect_left(cuts, high) - bisect_left(cuts, low) for low, high in spans)


def _truncated(kernel: Kernel, tiles: Sequence[Tile]) -> LoopNest:
    """Points and steps that show every pair of accesses that can meet in a slot; steps keep their remainder by the slots' turn."""
    nest = LoopNest(kernel.grid)
    points, steps = nest.points, nest.steps
    slots = {(t.rate, t.slots) for t in tiles}
    by_step = sorted({n for rate, n in slots if rate == "step"} | {1})
    by_point = sorted({n for rate, n in slots if rate == "point"} | {1})
    turn = math.lcm(*by_step)
    if max(turn, math.lcm(*by_point)) > MOST_TURNS:
        raise Refusal(f"tiles have {by_step} slots by step and {by_point} by point; expected a common multiple of at most {MOST_TURNS}")
    needed = turn + 1 if len(by_step) < 3 else 2 * turn
    if steps > needed:
        steps = needed + (steps - needed) % turn
    points = min(points, max(needed, math.lcm(*by_point) + 1))
    return LoopNest((GridAxis(points, "parallel"), GridAxis(steps, "sequential")))


class _OrderCheck:
    """One pass in program order over a truncated grid."""

    def __init__(self, kernel: Kernel, found: ResolvedKernel, chip: Chip, in_place: Mapping[int, Window]):
        self.kernel, self.in_place = kernel, in_place
        self.code, self.tiles = found.by_section(), found.tiles
        self.cells = TileCells(kernel, self.tiles, chip)
        self.clocks = Clocks(kernel.semaphores)
        self.hbm: dict[tuple[int, int, int], Cell] = {}

    def run(self, nest: LoopNest) -> None:
        """Every instruction of every section's runs."""
        for section, at in nest.walk():
            for i in self.code[section]:
                self._step(i, at)

    def _step(self, i: Resolved, at: Iteration) -> None:
        clock = self.clocks.tick(i.queue)
        if i.waits is not None:
            if not self.clocks.wait(i.waits, i.queue):
                raise Refusal(self._stuck(i.waits), i.number)
        elif i.signals is not None:
            self.clocks.signal(i.signals, i.queue)
        else:
            self._accesses(i, at, clock)

    def _accesses(self, i: Resolved, at: Iteration, clock: list[int]) -> None:
        event = (i.number, at.point, at.step)
        for numbers, access in ((i.reads, self.cells.read), (i.writes, self.cells.write)):
            for n in numbers:
                fault = access(n, at.slot(self.tiles[n]), i.queue, clock, event)
                if fault is not None:
                    raise self._refusal(tile_text(self.tiles[n]), fault, i.number)
        for role, window in i.windows:
            if window.buffer in self.in_place:
                fault = _ORDER[role](self._hbm_cell(window.buffer, event), i.queue, clock, event)
                if fault is not None:
                    raise self._refusal(f"buffer {window.buffer}", fault, i.number)

    def _hbm_cell(self, buffer: int, event: Event) -> Cell:
        """The piece of a buffer at this grid index, as far as its window moves with points and with steps."""
        moving = {self.kernel.grid[g].kind for a in self.in_place[buffer].axes for g, elements in a.grid if elements}
        point = event[1] if "parallel" in moving else -1
        step = event[2] if "sequential" in moving else -1
        return self.hbm.setdefault((buffer, point, step), Cell())

    def _stuck(self, semaphore: int) -> str:
        return (
            f"waits for semaphore {semaphore}, which nothing before it in program order can have raised: it never fires; "
            f"expected a signal, or an initial count above {self.kernel.semaphores[semaphore]}"
        )

    def _refusal(self, what: str, fault: Fault, number: int) -> Refusal:
        other = ""
        if fault.other is not None:
            n, point, step = fault.other
            other = f" (the other access: {section_place(self.kernel, n)}, point {point}, step {step})"
        return Refusal(f"{what} {fault.what}{other}; expected semaphores and tiles that imply program order", number)


_ORDER = {"read": read_order, "write": write_order}
"""What a window's role does to what it is on."""
