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
from dataclasses import dataclass

from tpuflow.chips.chip import Chip
from tpuflow.device.ordering import QUEUE_NUMBER, Cell, Clocks, Event, Fault, TileCells, read_order, slot_span, write_order
from tpuflow.device.place import SECTIONS, section_place, tile_text
from tpuflow.device.uses import Use
from tpuflow.device.verify.effort import Effort
from tpuflow.device.verify.refusal import Refusal
from tpuflow.isa.instruction import Tile, Window
from tpuflow.isa.program import Kernel

MOST_TURNS = 64


@dataclass(frozen=True, slots=True)
class _Access:
    """A tile operand: its number, slots, and whether the slot follows the steps (else the points)."""

    tile: int
    slots: int
    by_step: bool


@dataclass(frozen=True, slots=True)
class _Planned:
    """An instruction made ready for the walk: semaphore (or -1), accesses, and buffers updated in place that it touches."""

    number: int
    queue: int
    signals: int
    waits: int
    reads: tuple[_Access, ...]
    writes: tuple[_Access, ...]
    loads: tuple[int, ...]
    stores: tuple[int, ...]


def check_order(kernel: Kernel, found: Sequence[Use], chip: Chip, in_place: Mapping[int, Window], effort: Effort) -> None:
    """Refuse a kernel in which a wait never fires, a tile is read that is not there, or two accesses clash without order.

    in_place: the window of every buffer that the kernel reads and writes.
    """
    points, steps = _truncated(kernel, found)
    if points and (steps or kernel.prologue or kernel.epilogue):
        effort.visit(_visits(found, chip, points, steps))
        _Walk(kernel, found, chip, in_place).run(points, steps)


def _visits(found: Sequence[Use], chip: Chip, points: int, steps: int) -> int:
    """Cells that the walk makes and looks at, all slots of a tile taken to be cut into as many as the most cut one."""
    tiles = {t for u in found for t in (*u.reads, *u.writes)}
    edges: dict[str, list[int]] = {}
    for t in tiles:
        edges.setdefault(t.space, []).extend(edge for slot in range(t.slots) for edge in slot_span(t, slot, chip))
    cuts = {space: sorted(set(found)) for space, found in edges.items()}
    cells = {t: max(1, *_cuts_within(t, cuts[t.space], chip)) for t in tiles}
    made = sum(t.slots * n for t, n in cells.items())
    runs = {"prologue": points, "body": points * steps, "epilogue": points}
    return made + sum(runs[u.section] * (1 + sum(cells[t] for t in (*u.reads, *u.writes))) for u in found)


def _cuts_within(tile: Tile, cuts: Sequence[int], chip: Chip) -> Iterator[int]:
    spans = (slot_span(tile, slot, chip) for slot in range(tile.slots))
    return (bisect_left(cuts, high) - bisect_left(cuts, low) for low, high in spans)


def _truncated(kernel: Kernel, found: Sequence[Use]) -> tuple[int, int]:
    """Points and steps that show every pair of accesses that can meet in a slot; steps keep their remainder by the slots' turn."""
    points = math.prod(kernel.grid[g].size for g in kernel.parallel)
    steps = math.prod(kernel.grid[g].size for g in kernel.sequential)
    slots = {(t.rate, t.slots) for u in found for t in (*u.reads, *u.writes)}
    by_step = sorted({n for rate, n in slots if rate == "step"} | {1})
    by_point = sorted({n for rate, n in slots if rate == "point"} | {1})
    turn = math.lcm(*by_step)
    if max(turn, math.lcm(*by_point)) > MOST_TURNS:
        raise Refusal(f"tiles have {by_step} slots by step and {by_point} by point; expected a common multiple of at most {MOST_TURNS}")
    needed = turn + 1 if len(by_step) < 3 else 2 * turn
    if steps > needed:
        steps = needed + (steps - needed) % turn
    return min(points, max(needed, math.lcm(*by_point) + 1)), steps


class _Walk:
    """One pass in program order over a truncated grid."""

    def __init__(self, kernel: Kernel, found: Sequence[Use], chip: Chip, in_place: Mapping[int, Window]):
        self.kernel, self.in_place = kernel, in_place
        numbers: dict[Tile, int] = {}
        self.plans: dict[str, list[_Planned]] = {section: [] for section in SECTIONS}
        for use in found:
            self.plans[use.section].append(self._plan(use, numbers))
        self.tiles: Sequence[Tile] = tuple(numbers)
        self.cells = TileCells(kernel, self.tiles, chip)
        self.clocks = Clocks(kernel.semaphores)
        self.hbm: dict[tuple[int, int, int], Cell] = {}

    def _plan(self, use: Use, numbers: dict[Tile, int]) -> _Planned:
        def access(t: Tile) -> _Access:
            return _Access(numbers.setdefault(t, len(numbers)), t.slots, t.rate == "step")

        reads, writes = tuple(map(access, use.reads)), tuple(map(access, use.writes))
        loads, stores = (tuple(w.buffer for r, w in use.windows if r == role and w.buffer in self.in_place) for role in ("read", "write"))
        return _Planned(use.number, QUEUE_NUMBER[use.queue], use.signals, use.waits, reads, writes, loads, stores)

    def run(self, points: int, steps: int) -> None:
        """Every point: prologue, all steps, epilogue."""
        for point in range(points):
            self._section("prologue", point, 0, point * steps)
            for step in range(steps):
                self._section("body", point, step, point * steps + step)
            last = max(0, steps - 1)
            self._section("epilogue", point, last, point * steps + last)

    def _section(self, section: str, point: int, step: int, count: int) -> None:
        for plan in self.plans[section]:
            clock = self.clocks.tick(plan.queue)
            event = (plan.number, point, step)
            if plan.waits >= 0:
                if not self.clocks.wait(plan.waits, plan.queue):
                    raise Refusal(self._stuck(plan.waits), plan.number)
            elif plan.signals >= 0:
                self.clocks.signal(plan.signals, plan.queue)
            else:
                self._accesses(plan, clock, event, count)

    def _accesses(self, plan: _Planned, clock: list[int], event: Event, count: int) -> None:
        cells, queue = self.cells, plan.queue
        for a in plan.reads:
            fault = cells.read(a.tile, (count if a.by_step else event[1]) % a.slots, queue, clock, event)
            if fault is not None:
                raise self._refusal(tile_text(self.tiles[a.tile]), fault, plan.number)
        for a in plan.writes:
            fault = cells.write(a.tile, (count if a.by_step else event[1]) % a.slots, queue, clock, event)
            if fault is not None:
                raise self._refusal(tile_text(self.tiles[a.tile]), fault, plan.number)
        for buffer in plan.loads:
            fault = read_order(self._hbm_cell(buffer, event), queue, clock, event)
            if fault is not None:
                raise self._refusal(f"buffer {buffer}", fault, plan.number)
        for buffer in plan.stores:
            fault = write_order(self._hbm_cell(buffer, event), queue, clock, event)
            if fault is not None:
                raise self._refusal(f"buffer {buffer}", fault, plan.number)

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
