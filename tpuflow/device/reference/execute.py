"""One kernel running: six queues scheduled against the program, every access checked, every instruction executed by its meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tpuflow.device.ordering import QUEUE_NUMBER, Clocks, Event
from tpuflow.device.place import tile_text
from tpuflow.device.reference.hazards import Site, deadlock
from tpuflow.device.reference.memory import AxisSelection
from tpuflow.device.reference.plan import At, KernelPlan, Planned
from tpuflow.isa import dma, matrix, vector
from tpuflow.isa.arithmetic import Arithmetic
from tpuflow.isa.instruction import Instruction
from tpuflow.isa.windows import base_position

_COMPUTE = tuple(QUEUE_NUMBER[q] for q in ("scalar", "matrix", "vector", "link"))
_DMA = (QUEUE_NUMBER["load"], QUEUE_NUMBER["store"])
# Queues that run ahead as far as they can, then those that move one signal at a time when the first cannot go on.
_PRIORITIES = {"late": (_COMPUTE, _DMA), "early": (_DMA, _COMPUTE)}


class Run:
    """One execution of a kernel."""

    def __init__(self, plan: KernelPlan, path: str, arithmetic: Arithmetic, kept: frozenset[int]):
        self.plan, self.path, self.ar, self.kept = plan, path, arithmetic, kept
        self.clocks = Clocks(plan.kernel.semaphores)
        self.cells = plan.new_cells()
        self._streams: list[Iterator[tuple[Planned, At]]] = [plan.stream(q) for q in range(len(self.clocks.now))]
        self._next = [next(s, None) for s in self._streams]

    def execute(self, schedule: str) -> None:
        """Run all queues to their ends, DMA as late or as early as the semaphores allow."""
        self.plan.on_chip.clear(self.plan.reach)
        for shadow in self.plan.shadows:
            shadow.start()
        eager, lazy = _PRIORITIES[schedule]
        while any(n is not None for n in self._next):
            moved = [self._advance(q, to_signal=False) for q in eager]
            if not any(moved) and not any(self._advance(q, to_signal=True) for q in lazy):
                stuck = [((p.number, at.point, at.step), at.index) for p, at in filter(None, self._next)]
                raise deadlock(self.path, self.plan.kernel, stuck)

    def _advance(self, queue: int, *, to_signal: bool) -> bool:
        """Execute a queue's instructions until it must wait (or has signalled once); whether there were any."""
        moved = False
        while (upcoming := self._next[queue]) is not None:
            planned, at = upcoming
            if planned.waits >= 0 and not self.clocks.count(planned.waits):
                break
            self._step(planned, at)
            self._next[queue] = next(self._streams[queue], None)
            moved = True
            if to_signal and planned.signals >= 0:
                break
        return moved

    def _step(self, planned: Planned, at: At) -> None:
        queue = planned.queue
        clock = self.clocks.tick(queue)
        if planned.waits >= 0:
            self.clocks.wait(planned.waits, queue)
        elif planned.signals >= 0:
            self.clocks.signal(planned.signals, queue)
        else:
            event = (planned.number, at.point, at.step)
            if self.plan.problems:
                self._check_places(planned, at)
            for tile in planned.reads:
                fault = self.cells.read(tile, self._slot(tile, at), queue, clock, event)
                if fault is not None:
                    raise self.site(planned, at).fault(tile_text(self.plan.tiles[tile]), fault)
            self._execute(planned, at, clock)
            for tile in planned.writes:
                fault = self.cells.write(tile, self._slot(tile, at), queue, clock, event)
                if fault is not None:
                    raise self.site(planned, at).fault(tile_text(self.plan.tiles[tile]), fault)

    def _execute(self, planned: Planned, at: At, clock: list[int]) -> None:
        execute = _EXECUTE.get(type(planned.instruction))
        if execute is None:
            raise self.site(planned, at).hazard(f"instruction {planned.instruction.mnemonic!r} is not known to the reference engine")
        execute(self, planned, at, clock)

    def _check_places(self, planned: Planned, at: At) -> None:
        for tile in (*planned.reads, *planned.writes):
            if tile in self.plan.problems:
                raise self.site(planned, at).hazard(f"{tile_text(self.plan.tiles[tile])} {self.plan.problems[tile]} bytes")

    def site(self, planned: Planned, at: At) -> Site:
        """For errors."""
        return Site(self.path, self.plan.kernel, planned.number, at.index)

    def _slot(self, tile: int, at: At) -> int:
        t = self.plan.tiles[tile]
        return (at.count if t.rate == "step" else at.point) % t.slots

    def array(self, tile: int, at: At) -> np.ndarray:
        """A tile's valid array, a view of on-chip memory."""
        t = self.plan.tiles[tile]
        return self.plan.on_chip.array(t, self._slot(tile, at), t.valid_shape(at.index))

    def value(self, tile: int, at: At) -> Any:
        """A tile's value for the arithmetic."""
        return self.ar.load(self.array(tile, at), self.plan.tiles[tile].dtype)

    def put(self, planned: Planned, at: At, results: tuple[Any, ...]) -> None:
        """Store what an instruction computed in its destinations."""
        for tile, result in zip(planned.writes, results, strict=True):
            target = self.array(tile, at)
            stored = self.ar.store(result, self.plan.tiles[tile].dtype)
            assert stored.shape == target.shape and stored.dtype == target.dtype, (self.site(planned, at), stored.shape, target.shape)
            target[...] = stored

    # --- windows

    def selections(self, planned: Planned, at: At, first: int = 0) -> list[AxisSelection]:
        """What the window's axes (from number `first` on) select at this grid index."""
        access = planned.window
        assert access is not None
        registers = iter(planned.reads)
        found = []
        for n, (axis, tile) in enumerate(zip(access.window.axes, access.window.tile.axes, strict=True)):
            register = 0 if axis.register is None else int(self.array(next(registers), at))
            if n >= first:
                length = tile.valid(at.index[tile.grid]) if tile.grid >= 0 else tile.size
                found.append(access.select(n, length, base_position(axis, at.index, register)))
        return found

    def check_read(self, planned: Planned, at: At, where: tuple[Any, ...], clock: list[int]) -> None:
        """Everything read in HBM was written as part of this buffer, in order."""
        access = planned.window
        assert access is not None
        number = access.window.buffer
        owner = access.owner[where]
        if not (owner == number).all():
            other = int(owner[owner != number][0])
            found = "nothing has written" if other < 0 else f"was last written as part of buffer {other}"
            raise self.site(planned, at).hazard(f"reads what {found} in buffer {number}")
        self._shadow(planned, at, "read", where, clock)

    def check_write(self, planned: Planned, at: At, where: tuple[Any, ...], clock: list[int]) -> None:
        """A write to HBM may happen, in order; notes it."""
        access = planned.window
        assert access is not None
        number = access.window.buffer
        if number in self.kept:
            raise self.site(planned, at).hazard(f"writes buffer {number}, where a constant or an input that is not donated lies")
        self._shadow(planned, at, "write", where, clock)
        access.owner[where] = number

    def _shadow(self, planned: Planned, at: At, role: str, where: tuple[Any, ...], clock: list[int]) -> None:
        if planned.shadow is None or planned.window is None:
            return
        event: Event = (planned.number, at.point, at.step)
        here = {key: table[where] for key, table in planned.stamps.items()}
        fault = planned.shadow.access(role, here, planned.queue, clock, event)
        planned.stamps[role, planned.queue][where] = planned.shadow.stamp(clock[planned.queue])
        if fault is not None:
            raise self.site(planned, at).fault(f"buffer {planned.window.window.buffer}", fault)


# --- instructions


def _compute(run: Run, planned: Planned, at: At, clock: list[int]) -> None:
    """Instructions whose meaning takes the values read and gives the values written."""
    result = planned.instruction.meaning(run.ar, *(run.value(t, at) for t in planned.reads))
    run.put(planned, at, result if len(planned.writes) > 1 or isinstance(result, tuple) else (result,))


def _shaped(run: Run, planned: Planned, at: At, clock: list[int]) -> None:
    """Instructions whose meaning also takes the valid shape of the destination, after the values read."""
    shape = run.plan.tiles[planned.writes[0]].valid_shape(at.index)
    values = (run.value(t, at) for t in planned.reads)
    run.put(planned, at, (planned.instruction.meaning(run.ar, *values, shape),))


def _iota(run: Run, planned: Planned, at: At, clock: list[int]) -> None:
    tile = run.plan.tiles[planned.writes[0]]
    axis = tile.axes[planned.instruction.axis]
    start = at.index[axis.grid] * axis.size if axis.grid >= 0 else 0
    run.put(planned, at, (planned.instruction.meaning(run.ar, tile.valid_shape(at.index), start),))


def _matmul(run: Run, planned: Planned, at: At, clock: list[int]) -> None:
    instruction = planned.instruction
    assert isinstance(instruction, matrix.MatmulAccumulate)
    axis_of = instruction.axis_of

    def start(label: int) -> int:
        axis = axis_of[label]
        return at.index[axis.grid] * axis.size if axis.grid >= 0 else 0

    acc, a, b = (run.value(t, at) for t in planned.reads)
    run.put(planned, at, (instruction.meaning(run.ar, acc, a, b, start),))


def _load(run: Run, planned: Planned, at: At, clock: list[int]) -> None:
    access = planned.window
    assert access is not None
    selections = run.selections(planned, at)
    target = run.array(planned.writes[0], at)
    if not all(s.whole for s in selections):
        target[...] = access.fill
    where = tuple(s.view for s in selections)
    run.check_read(planned, at, where, clock)
    target[tuple(s.tile for s in selections)] = access.data[where]


def _store(run: Run, planned: Planned, at: At, clock: list[int]) -> None:
    access = planned.window
    assert access is not None
    selections = run.selections(planned, at)
    where = tuple(s.view for s in selections)
    run.check_write(planned, at, where, clock)
    access.data[where] = run.array(planned.reads[-1], at)[tuple(s.last for s in selections)]


def _rows(run: Run, planned: Planned, at: At) -> tuple[np.ndarray, np.ndarray]:
    """(rows of the tile, rows of the buffer's view) that meet, in index order."""
    access = planned.window
    assert access is not None
    axis = access.window.axes[0]
    index = run.array(planned.reads[-1], at).astype(np.int64)
    register = int(run.array(planned.reads[0], at)) if axis.register is not None else 0
    place = index + base_position(axis, at.index, register)
    rows = np.flatnonzero((place >= 0) & (place < axis.extent))
    return rows, place[rows]


def _load_indexed(run: Run, planned: Planned, at: At, clock: list[int]) -> None:
    access = planned.window
    assert access is not None
    rows, places = _rows(run, planned, at)
    rest = run.selections(planned, at, 1)
    target = run.array(planned.writes[0], at)
    target[...] = access.fill
    where = (places, *(s.view for s in rest))
    run.check_read(planned, at, where, clock)
    target[(rows, *(s.tile for s in rest))] = access.data[where]


def _store_indexed(run: Run, planned: Planned, at: At, clock: list[int]) -> None:
    access, instruction = planned.window, planned.instruction
    assert access is not None and isinstance(instruction, dma.StoreIndexed)
    dtype, ar = access.window.tile.dtype, run.ar
    rows, places = _rows(run, planned, at)
    rest = run.selections(planned, at, 1)
    values = run.array(planned.reads[-2], at)[(slice(None), *(s.last for s in rest))]
    for turn in _turns(places):
        where = (places[turn], *(s.view for s in rest))
        new = values[rows[turn]]
        if instruction.mode != "set":
            run.check_read(planned, at, where, clock)
            new = ar.store(ar.binary(instruction.mode, ar.load(access.data[where], dtype), ar.load(new, dtype), dtype), dtype)
        run.check_write(planned, at, where, clock)
        access.data[where] = new


def _turns(places: np.ndarray) -> Iterator[np.ndarray]:
    """Positions in `places` grouped so that each group names every place at most once, and repeats come in order."""
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    first = np.searchsorted(ordered, ordered, side="left")
    turn = np.empty(places.size, np.int64)
    turn[order] = np.arange(places.size) - first
    for n in range(int(turn.max()) + 1 if turn.size else 0):
        yield np.flatnonzero(turn == n)


_BY_VALUES: tuple[type[Instruction], ...] = (
    vector.Unary, vector.IsFinite, vector.Binary, vector.Compare, vector.Select, vector.Convert, vector.Bitcast, vector.Transpose,
    vector.ReduceInto, vector.Cumulative, vector.Sort, matrix.MatmulRead,
)  # fmt: skip
_EXECUTE: dict[type[Instruction], Callable[[Run, Planned, At, list[int]], None]] = {
    vector.Constant: _shaped,
    vector.Broadcast: _shaped,
    matrix.MatmulZero: _shaped,
    vector.Iota: _iota,
    matrix.MatmulAccumulate: _matmul,
    dma.Load: _load,
    dma.Store: _store,
    dma.LoadIndexed: _load_indexed,
    dma.StoreIndexed: _store_indexed,
    **dict.fromkeys(_BY_VALUES, _compute),
}
