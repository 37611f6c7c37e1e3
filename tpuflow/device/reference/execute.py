"""One kernel running: six queues scheduled against the program, every access checked, every instruction executed by its meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tpuflow.device.ordering import Clocks, Event
from tpuflow.device.place import tile_text
from tpuflow.device.reference.hazards import Site, deadlock
from tpuflow.device.reference.memory import AxisSelection
from tpuflow.device.reference.plan import KernelPlan
from tpuflow.device.resolved import QUEUE_NUMBER, Resolved
from tpuflow.isa import dma
from tpuflow.isa.arithmetic import Arithmetic
from tpuflow.isa.instruction import Instruction
from tpuflow.isa.loop_nest import Iteration
from tpuflow.isa.trip import Trip
from tpuflow.isa.windows import base_position

_COMPUTE = tuple(QUEUE_NUMBER[q] for q in ("scalar", "matrix", "vector", "link"))
_DMA = (QUEUE_NUMBER["load"], QUEUE_NUMBER["store"])
# Queues that run ahead as far as they can, then those that move one signal at a time when the first cannot go on.
_PRIORITIES = {"late": (_COMPUTE, _DMA), "early": (_DMA, _COMPUTE)}


class Run:
    """One execution of a kernel."""

    def __init__(self, plan: KernelPlan, path: str, arithmetic: Arithmetic, kept: Mapping[int, str], arriving: frozenset[int]):
        self.plan, self.path, self.ar, self.kept, self.arriving = plan, path, arithmetic, kept, arriving
        self.clocks = Clocks(plan.kernel.semaphores)
        self.cells = plan.new_cells()
        self._streams: list[Iterator[tuple[Resolved, Iteration]]] = [plan.stream(q) for q in range(len(self.clocks.now))]
        self._next = [next(s, None) for s in self._streams]

    def execute(self, schedule: str) -> None:
        """Run all queues to their ends, DMA as late or as early as the semaphores allow."""
        self.plan.on_chip.clear(self.plan.reach)
        self.plan.hbm.lose(self.plan.tile_stretches)
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
            i, at = upcoming
            if i.waits is not None and not self.clocks.count(i.waits):
                break
            self._step(i, at)
            self._next[queue] = next(self._streams[queue], None)
            moved = True
            if to_signal and i.signals is not None:
                break
        return moved

    def _step(self, i: Resolved, at: Iteration) -> None:
        queue = i.queue
        clock = self.clocks.tick(queue)
        if i.waits is not None:
            self.clocks.wait(i.waits, queue)
        elif i.signals is not None:
            self.clocks.signal(i.signals, queue)
        else:
            event = (i.number, at.point, at.step)
            if self.plan.problems:
                self._check_places(i, at)
            for tile in i.reads:
                fault = self.cells.read(tile, self._slot(tile, at), queue, clock, event)
                if fault is not None:
                    raise self.site(i, at).fault(tile_text(self.plan.tiles[tile]), fault)
            self._execute(i, at, clock)
            for tile in i.writes:
                fault = self.cells.write(tile, self._slot(tile, at), queue, clock, event)
                if fault is not None:
                    raise self.site(i, at).fault(tile_text(self.plan.tiles[tile]), fault)

    def _execute(self, i: Resolved, at: Iteration, clock: list[int]) -> None:
        if not i.instruction.has("transfers"):
            _compute(self, i, at, clock)
        elif (move := _TRANSFERS.get(type(i.instruction))) is not None:
            move(self, i, at, clock)
        else:
            raise self.site(i, at).hazard(f"transfer {i.instruction.mnemonic!r} is not known to the reference engine")

    def _check_places(self, i: Resolved, at: Iteration) -> None:
        for tile in (*i.reads, *i.writes):
            if tile in self.plan.problems:
                raise self.site(i, at).hazard(f"{tile_text(self.plan.tiles[tile])} {self.plan.problems[tile]} bytes")

    def site(self, i: Resolved, at: Iteration) -> Site:
        """For errors."""
        return Site(self.path, self.plan.kernel, i.number, at.index)

    def _slot(self, tile: int, at: Iteration) -> int:
        return at.slot(self.plan.tiles[tile])

    def array(self, tile: int, at: Iteration) -> np.ndarray:
        """A tile's valid array, a view of on-chip memory."""
        t = self.plan.tiles[tile]
        return self.plan.on_chip.array(t, at.slot(t), t.valid_shape(at.index))

    def value(self, tile: int, at: Iteration) -> Any:
        """A tile's value for the arithmetic."""
        return self.ar.load(self.array(tile, at), self.plan.tiles[tile].dtype)

    def put(self, i: Resolved, at: Iteration, results: tuple[Any, ...]) -> None:
        """Store what an instruction computed in its destinations."""
        for tile, result in zip(i.writes, results, strict=True):
            target = self.array(tile, at)
            stored = self.ar.store(result, self.plan.tiles[tile].dtype)
            assert stored.shape == target.shape and stored.dtype == target.dtype, (self.site(i, at), stored.shape, target.shape)
            target[...] = stored

    # --- windows

    def selections(self, i: Resolved, at: Iteration, first: int = 0) -> list[AxisSelection]:
        """What the window's axes (from number `first` on) select at this grid index."""
        access = self.plan.windows[i.number]
        registers = iter(i.reads)
        found = []
        for n, (axis, tile) in enumerate(zip(access.window.axes, access.window.tile.axes, strict=True)):
            register = 0 if axis.register is None else int(self.array(next(registers), at))
            if n >= first:
                length = tile.valid(at.index[tile.grid]) if tile.grid >= 0 else tile.size
                found.append(access.select(n, length, base_position(axis, at.index, register)))
        return found

    def check_read(self, i: Resolved, at: Iteration, where: tuple[Any, ...], clock: list[int]) -> None:
        """Everything read in HBM was written as part of this buffer, in order."""
        access = self.plan.windows[i.number]
        number = access.window.buffer
        self._check_core(i, at, "reads", where)
        owner = access.owner[where]
        if not (owner == number).all():
            other = int(owner[owner != number][0])
            found = self._nothing(number) if other < 0 else f"was last written as part of buffer {other}"
            found = "has not arrived yet" if number in self.arriving else found
            raise self.site(i, at).hazard(f"reads what {found} in buffer {number}")
        self._shadow(i, at, "read", where, clock)

    def _check_core(self, i: Resolved, at: Iteration, what: str, where: tuple[Any, ...]) -> None:
        """A core reaches only what it has itself of an array that stays in VMEM."""
        access, cores = self.plan.windows[i.number], self.plan.on_chip.chip.cores
        if cores == 1 or not self.plan.hbm.buffers[access.window.buffer].is_parted:
            return
        own, touched = self.plan.parts.core(at), access.cores(cores)[where]
        if not (touched == own).all():
            other = int(touched[touched != own][0])
            raise self.site(i, at).hazard(f"on core {own} {what} what core {other} has of buffer {access.window.buffer} in its VMEM")

    def _nothing(self, buffer: int) -> str:
        tiles = ", or tiles have taken its place since," if self.plan.hbm.buffers[buffer].is_parted else ""
        return f"nothing has written{tiles}"

    def check_write(self, i: Resolved, at: Iteration, where: tuple[Any, ...], clock: list[int]) -> None:
        """A write to HBM may happen, in order; notes it."""
        access = self.plan.windows[i.number]
        number = access.window.buffer
        if number in self.kept:
            raise self.site(i, at).hazard(f"writes buffer {number}, {self.kept[number]}")
        self._check_core(i, at, "writes", where)
        if number in self.plan.taken:
            raise self.site(i, at).hazard(f"writes buffer {number}, in whose place in VMEM this kernel has tiles")
        self._shadow(i, at, "write", where, clock)
        access.owner[where] = number

    def _shadow(self, i: Resolved, at: Iteration, role: str, where: tuple[Any, ...], clock: list[int]) -> None:
        access = self.plan.windows[i.number]
        if access.shadow is None:
            return
        event: Event = (i.number, at.point, at.step)
        here = {key: table[where] for key, table in access.stamps.items()}
        fault = access.shadow.access(role, here, i.queue, clock, event)
        access.stamps[role, i.queue][where] = access.shadow.stamp(clock[i.queue])
        if fault is not None:
            raise self.site(i, at).fault(f"buffer {access.window.buffer}", fault)


# --- instructions


def _compute(run: Run, i: Resolved, at: Iteration, clock: list[int]) -> None:
    """Instructions that have a meaning: the values read give the values written."""
    trip = Trip(run.plan.tiles[i.writes[0]].valid_shape(at.index), at.start)
    instruction: Any = i.instruction
    result = instruction.meaning(run.ar, trip, *(run.value(t, at) for t in i.reads))
    run.put(i, at, result if isinstance(result, tuple) else (result,))


def _load(run: Run, i: Resolved, at: Iteration, clock: list[int]) -> None:
    access = run.plan.windows[i.number]
    selections = run.selections(i, at)
    target = run.array(i.writes[0], at)
    if not all(s.whole for s in selections):
        target[...] = access.fill
    where = tuple(s.view for s in selections)
    run.check_read(i, at, where, clock)
    target[tuple(s.tile for s in selections)] = access.data[where]


def _store(run: Run, i: Resolved, at: Iteration, clock: list[int]) -> None:
    access = run.plan.windows[i.number]
    selections = run.selections(i, at)
    where = tuple(s.view for s in selections)
    run.check_write(i, at, where, clock)
    access.data[where] = run.array(i.reads[-1], at)[tuple(s.last for s in selections)]


def _rows(run: Run, i: Resolved, at: Iteration) -> tuple[np.ndarray, np.ndarray]:
    """(rows of the tile, rows of the buffer's view) that meet, in index order."""
    access = run.plan.windows[i.number]
    axis = access.window.axes[0]
    index = run.array(i.reads[-1], at).astype(np.int64)
    register = int(run.array(i.reads[0], at)) if axis.register is not None else 0
    place = index + base_position(axis, at.index, register)
    rows = np.flatnonzero((place >= 0) & (place < axis.extent))
    return rows, place[rows]


def _load_indexed(run: Run, i: Resolved, at: Iteration, clock: list[int]) -> None:
    access = run.plan.windows[i.number]
    rows, places = _rows(run, i, at)
    rest = run.selections(i, at, 1)
    target = run.array(i.writes[0], at)
    target[...] = access.fill
    where = (places, *(s.view for s in rest))
    run.check_read(i, at, where, clock)
    target[(rows, *(s.tile for s in rest))] = access.data[where]


def _store_indexed(run: Run, i: Resolved, at: Iteration, clock: list[int]) -> None:
    access, instruction = run.plan.windows[i.number], i.instruction
    assert isinstance(instruction, dma.StoreIndexed)
    dtype, ar = access.window.tile.dtype, run.ar
    rows, places = _rows(run, i, at)
    rest = run.selections(i, at, 1)
    values = run.array(i.reads[-2], at)[(slice(None), *(s.last for s in rest))]
    for turn in _turns(places):
        where = (places[turn], *(s.view for s in rest))
        new = values[rows[turn]]
        if instruction.mode != "set":
            run.check_read(i, at, where, clock)
            new = ar.store(ar.binary(instruction.mode, ar.load(access.data[where], dtype), ar.load(new, dtype), dtype), dtype)
        run.check_write(i, at, where, clock)
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


_TRANSFERS: dict[type[Instruction], Callable[[Run, Resolved, Iteration, list[int]], None]] = {
    dma.Load: _load,
    dma.Store: _store,
    dma.LoadIndexed: _load_indexed,
    dma.StoreIndexed: _store_indexed,
}
