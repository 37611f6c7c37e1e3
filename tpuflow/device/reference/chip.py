"""One chip of the reference engine: a Program executed in NumPy, one tile instruction at a time, with every check on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tpuflow.device.budget import Budget, OutOfBudget, Workload
from tpuflow.device.launching import run_dry
from tpuflow.device.place import kernel_place
from tpuflow.device.reference.execute import Run
from tpuflow.device.reference.memory import Hbm, OnChip
from tpuflow.device.reference.plan import KernelPlan
from tpuflow.errors import HazardError, LaunchError
from tpuflow.isa.arithmetic import Arithmetic
from tpuflow.isa.collectives import Await, Collective, Position, position, where_text
from tpuflow.isa.program import Block, CallHost, Copy, Infeed, Kernel, Loop, Moving, Outfeed, Program, Switch, While, moving_text

KEPT = "where a constant or an input that is not donated lies"


class Meeting(NamedTuple):
    """Where a chip stops until the others have come there too: at a collective's start or wait, a call of the host that is made once, or
    (None) after a trip of a loop that is the Program's last block."""

    path: str
    block: Collective | Await | CallHost | None


Meetings = Iterable[Meeting]


class ChipRun:
    """Runs a Program on chip number `chip` of its mesh. `sent` has the items of each outfeed port."""

    def __init__(self, program: Program, chip: int, schedule: str, arithmetic: Arithmetic, workload: Workload):
        self.program, self.chip, self.schedule = program, chip, schedule
        self._arithmetic = arithmetic
        self._plans: dict[int, KernelPlan] = {}
        self._prices = workload.numbers
        self._budget: Budget | None = None
        self._work = 0
        self._infeeds: list[Iterator[np.ndarray]] = []
        self._items: list[int] = []
        self._moving: dict[int, tuple[Moving, str, np.ndarray]] = {}
        self._items_of: dict[int, tuple[int | None, int | None]] = {}  # of what moves: that of its source, that of its target
        self.sent: list[list[np.ndarray]] = []

    @functools.cached_property
    def _hbm(self) -> Hbm:
        """Memory, made when it is first needed."""
        return Hbm(self.program.buffers)

    @functools.cached_property
    def _by_items(self) -> tuple[int, ...]:
        """What is zeros at first, in order."""
        return tuple(sorted(self.program.by_items))

    @functools.cached_property
    def _on_chip(self) -> OnChip:
        """On-chip memory, which all kernels use one after the other."""
        return OnChip(self.program.chip)

    @functools.cached_property
    def _kept(self) -> Mapping[int, str]:
        """Buffers that nobody may write, and why: they lie where a constant or an input that is not donated does."""
        program = self.program
        kept = self._hbm.overlapping({c.buffer for c in program.constants} | {p.buffer for p in program.inputs if not p.donated})
        return dict.fromkeys(kept, KEPT)

    def pieces(self) -> Iterator[Meeting]:
        """Run what `begin` has made ready, up to every meeting."""
        code = self.program.code
        tail = code[-1] if code and isinstance(code[-1], Loop) else None
        yield from self._blocks(code if tail is None else code[:-1], "")
        if tail is None:
            return
        place = f"{len(code) - 1}"
        for _ in range(self._trips(tail, place)):
            self._count(tail)
            yield from self._blocks(tail.body, f"{place}.body.")
            yield Meeting(place, None)

    def output(self, number: int) -> np.ndarray:
        """A copy of an output, as of now."""
        port = self.program.outputs[number]
        return self._read(f"output {port.name!r}", port.buffer)

    def begin(self, inputs: Sequence[np.ndarray], infeeds: Sequence[np.ndarray], budget: Budget | None) -> None:
        """The memory as a launch finds it."""
        program, hbm = self.program, self._hbm
        hbm.clear()
        self._moving, self._items_of = {}, {}
        for c in program.constants:
            b = program.buffers[c.buffer]
            hbm.write(c.buffer, np.frombuffer(c.data, b.dtype.numpy).reshape(b.shape))
        for port, x in zip(program.inputs, inputs, strict=True):
            hbm.write(port.buffer, x)
        for buffer in self._by_items:
            hbm.write(buffer, np.zeros((), program.buffers[buffer].dtype.numpy))
        self._budget, self._work = budget, 0 if budget is None else budget.start
        self._items = [len(x) for x in infeeds]
        self._infeeds, self.sent = [iter(x) for x in infeeds], [[] for _ in program.outfeeds]

    def _blocks(self, code: Sequence[Block], path: str) -> Iterator[Meeting]:
        for n, block in enumerate(code):
            yield from _BLOCKS[type(block)](self, block, f"{path}{n}")

    def _read(self, where: str, buffer: int, item: int | None = None) -> np.ndarray:
        """A copy of a buffer, or of an item of it, that must be written."""
        if not self._hbm.is_written(buffer, item):
            what = f"buffer {buffer}" if item is None else f"item {item} of buffer {buffer}"
            raise HazardError(f"{where}: {what} is read before all of it was written, or after another buffer overwrote it.")
        return self._hbm.array(buffer, item).copy()

    def _kernel(self, block: Kernel, path: str) -> Meetings:
        plan = self._plans.get(id(block))
        if plan is None:
            plan = self._plans[id(block)] = KernelPlan(block, self._on_chip, self._hbm)
        self._check_tiles(plan, path)
        arriving = frozenset(c.target for c, _, _ in self._moving.values())
        run = Run(plan, path, self._arithmetic, {**self._kept, **self._sending()} if self._moving else self._kept, arriving)
        try:
            run.execute(self.schedule)
        except (HazardError, LaunchError):
            raise
        except Exception as error:
            error.add_note(f"while executing {kernel_place(path, block)}")
            raise
        return ()

    def _loop(self, block: Loop, path: str) -> Meetings:
        for _ in range(self._trips(block, path)):
            self._count(block)
            yield from self._blocks(block.body, f"{path}.body.")

    def _trips(self, block: Loop, path: str) -> int:
        return int(self._read(f"loop {path}", block.trips))

    def _while(self, block: While, path: str) -> Meetings:
        while True:
            self._count(block)
            yield from self._blocks(block.condition, f"{path}.condition.")
            if not self._read(f"while {path}", block.predicate):
                return
            yield from self._blocks(block.body, f"{path}.body.")

    def _count(self, block: Loop | While) -> None:
        """Add what a trip of a loop costs, if only the run knows how many there are."""
        if self._budget is not None and id(block) in self._prices:
            self._work += self._budget.trips[self._prices[id(block)][0]]
            if self._work > self._budget.limit:
                raise OutOfBudget

    def _switch(self, block: Switch, path: str) -> Meetings:
        branch = min(max(0, int(self._read(f"switch {path}", block.index))), len(block.branches) - 1)
        return self._blocks(block.branches[branch], f"{path}.branch{branch}.")

    def _infeed(self, block: Infeed, path: str) -> Meetings:
        item = next(self._infeeds[block.port], None)
        if item is None:
            raise run_dry(self.program.infeeds, self._items)
        self._hbm.write(block.buffer, item)
        return ()

    def _outfeed(self, block: Outfeed, path: str) -> Meetings:
        self.sent[block.port].append(self._read(f"outfeed {path}", block.buffer))
        return ()

    def _call_host(self, block: CallHost, path: str) -> Meetings:
        function = self.program.functions[block.function]
        if self.program.mesh and not function.per_chip:
            yield Meeting(path, block)
        else:
            self.answer(block, function.answer(self.asking(block, path)))

    def asking(self, block: CallHost, path: str) -> list[np.ndarray]:
        """What a call of the host sends."""
        return [self._read(f"callhost {path}", source) for source in block.sources]

    def answer(self, block: CallHost, arrays: Sequence[np.ndarray]) -> None:
        """What the host returns for a call."""
        for target, x in zip(block.targets, arrays, strict=True):
            self._hbm.write(target, x.reshape(self.program.buffers[target].shape))

    # ---- other chips

    def _position(self, block: Position, path: str) -> Meetings:
        self._hbm.write(block.buffer, np.asarray(position(self.program.mesh, self.chip, block.axis), np.int32))
        return ()

    def _meet(self, block: Collective, path: str) -> Meetings:
        yield Meeting(path, block)

    def _await(self, block: Await, path: str) -> Meetings:
        if isinstance(self.started(block, path), Copy):
            self.receive(block.semaphore, self.message(block.semaphore))
            return
        yield Meeting(path, block)

    def _copy(self, block: Copy, path: str) -> Meetings:
        if block.semaphore in self._moving:
            raise HazardError(f"copy {path}: semaphore {block.semaphore} is taken by what is still on its way.")
        self.start(block, path)
        return ()

    def _check_tiles(self, plan: KernelPlan, path: str) -> None:
        """A kernel's tiles leave alone what is on its way from or to the chip."""
        for c, start, _ in self._moving.values():
            for number in (c.source, c.target):
                if plan.takes(self.program.buffers[number]):
                    where = kernel_place(path, plan.kernel)
                    raise HazardError(f"{where}: has tiles where buffer {number} lies, which {moving_text(c)} {start} is still moving.")

    def start(self, c: Moving, path: str) -> None:
        """What is sent must be there; what is received is not there any more."""
        where = f"{moving_text(c)} {path}"
        sending, receiving = self._chosen(c, where)
        sent = self._read(f"{where}{where_text(c)}", c.source, sending)
        self._moving[c.semaphore] = c, path, sent
        self._items_of[c.semaphore] = sending, receiving
        self._hbm.forget(c.target, receiving)

    def _chosen(self, c: Moving, where: str) -> tuple[int | None, int | None]:
        """The items that a copy takes, and writes, if it does not take and write the whole."""
        if isinstance(c, Collective) or c.index < 0:
            return None, None
        item, at_host = int(self._read(where, c.index)), self.program.is_host(c.source)
        count = self.program.buffers[c.source if at_host else c.target].shape[0]
        if not 0 <= item < count:
            raise HazardError(f"{where}: buffer {c.index} asks for item {item}; expected one of the {count} at the host.")
        return (item, None) if at_host else (None, item)

    def started(self, block: Await, path: str) -> Moving:
        """The collective or copy that is waited for."""
        if block.semaphore not in self._moving:
            raise HazardError(f"await {path}: nothing is on its way for semaphore {block.semaphore}.")
        return self._moving[block.semaphore][0]

    def message(self, semaphore: int) -> np.ndarray:
        """What is sent, as early as it may be, or as late: [elems]."""
        c, path, sent = self._moving[semaphore]
        late = self._read(f"{moving_text(c)} {path}", c.source, self._items_of[semaphore][0])
        if sent.tobytes() != late.tobytes():
            raise HazardError(
                f"{moving_text(c)} {path}: its source, buffer {c.source}, is overwritten while it is being sent.{where_text(c)}"
            )
        return (sent if self.schedule == "early" else late).reshape(-1)

    def receive(self, semaphore: int, elems: np.ndarray) -> None:
        """What has arrived, [elems]; the buffers are free again."""
        c, path, _ = self._moving.pop(semaphore)
        _, item = self._items_of.pop(semaphore)
        if self._hbm.is_touched(c.target, item):
            raise HazardError(f"{moving_text(c)} {path}: its target, buffer {c.target}, is written before it has arrived.")
        self._hbm.write(c.target, elems.reshape(self._hbm.array(c.target, item).shape), item)

    def _sending(self) -> Mapping[int, str]:
        """Buffers that nobody may write now, and why."""
        found: dict[int, str] = {}
        for c, path, _ in self._moving.values():
            found |= dict.fromkeys(self._hbm.overlapping({c.source}), f"which {moving_text(c)} {path} is sending{where_text(c)}")
            found |= dict.fromkeys(self._hbm.overlapping({c.target}), f"which {moving_text(c)} {path} is still receiving{where_text(c)}")
        return found


_BLOCKS: dict[type, Callable[..., Meetings]] = {
    Kernel: ChipRun._kernel,
    Loop: ChipRun._loop,
    While: ChipRun._while,
    Switch: ChipRun._switch,
    Infeed: ChipRun._infeed,
    Outfeed: ChipRun._outfeed,
    Position: ChipRun._position,
    Collective: ChipRun._meet,
    Await: ChipRun._await,
    Copy: ChipRun._copy,
    CallHost: ChipRun._call_host,
}
