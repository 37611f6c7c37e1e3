"""The reference engine: a Program executed in NumPy, one tile instruction at a time, with every check on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tpuflow.device.budget import Budget, OutOfBudget, Workload
from tpuflow.device.launching import check_arguments, run_dry
from tpuflow.device.place import kernel_place
from tpuflow.device.reference.execute import Run
from tpuflow.device.reference.memory import Hbm, OnChip
from tpuflow.device.reference.plan import KernelPlan
from tpuflow.device.verify import verify as verify_program
from tpuflow.errors import ConfigError, HazardError, LaunchError
from tpuflow.isa.arithmetic import Arithmetic
from tpuflow.isa.numpy_arithmetic import NumpyArithmetic
from tpuflow.isa.program import Block, Infeed, Kernel, Loop, Outfeed, Port, Program, Switch, While

SCHEDULES = ("late", "early")


class ReferenceEngine:
    """Runs a Program tile by tile.

    Args:
      program: what to run.
      verify: check it first; without, the hazards of an invalid Program are found while it runs.
      schedule: DMA completes as "late" or as "early" as the semaphores allow.
      arithmetic: the implementation of the device's arithmetic (NumPy's).

    Raises:
      ProgramError: the verifier refuses the Program.
      ConfigError: unknown schedule.
    """

    def __init__(self, program: Program, *, verify: bool = True, schedule: str = "late", arithmetic: Arithmetic | None = None):
        if schedule not in SCHEDULES:
            raise ConfigError(f"unknown schedule {schedule!r}; choose one of {', '.join(SCHEDULES)}.")
        if verify:
            verify_program(program)
        self.program, self.schedule = program, schedule
        self._arithmetic = arithmetic if arithmetic is not None else NumpyArithmetic()
        self._plans: dict[int, KernelPlan] = {}
        self._prices = Workload(program).numbers
        self._budget: Budget | None = None
        self._work = 0
        self._infeeds: list[Iterator[np.ndarray]] = []
        self._items: list[int] = []
        self.sent: list[list[np.ndarray]] = []

    @functools.cached_property
    def _hbm(self) -> Hbm:
        """Memory, made when it is first needed."""
        return Hbm(self.program.buffers)

    @functools.cached_property
    def _on_chip(self) -> OnChip:
        """On-chip memory, which all kernels use one after the other."""
        return OnChip(self.program.chip)

    @functools.cached_property
    def _kept(self) -> frozenset[int]:
        """Buffers that lie where a constant or an input that is not donated does."""
        program = self.program
        return self._hbm.overlapping({c.buffer for c in program.constants} | {p.buffer for p in program.inputs if not p.donated})

    def launch(
        self, inputs: Sequence[np.ndarray], infeeds: Sequence[np.ndarray] = (), budget: Budget | None = None
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Run once, from poisoned memory.

        inputs: one array a port. infeeds: one stacked array [items, ...] a port, taken from the first item on. budget: where it stops.
        Returns (one array an output port, one stacked array [items sent, ...] an outfeed port).

        Raises:
          HazardError: a machine-level fault.
          LaunchError: the arguments do not fit the signature, or an infeed runs dry.
          OutOfBudget: the run does more work than the budget allows.
        """
        for _ in self.fly(inputs, infeeds, budget):
            pass
        return self.outputs, [stacked(p, items) for p, items in zip(self.program.outfeeds, self.sent, strict=True)]

    def fly(self, inputs: Sequence[np.ndarray], infeeds: Sequence[np.ndarray] = (), budget: Budget | None = None) -> Iterator[int]:
        """Run as `launch` does, in pieces: gives 1 after every trip of a loop that is the Program's last block.

        `sent` has what was sent so far, for each outfeed port a list of items.
        """
        self._begin(inputs, infeeds, budget)
        return self._pieces()

    def _pieces(self) -> Iterator[int]:
        code = self.program.code
        tail = code[-1] if code and isinstance(code[-1], Loop) else None
        with np.errstate(all="ignore"):
            self._blocks(code if tail is None else code[:-1], "")
        if tail is None:
            return
        place = f"{len(code) - 1}"
        for _ in range(self._trips(tail, place)):
            self._count(tail)
            with np.errstate(all="ignore"):  # not across the yield: it would hold for whoever is told
                self._blocks(tail.body, f"{place}.body.")
            yield 1

    @property
    def outputs(self) -> list[np.ndarray]:
        """A copy of every output, as of now."""
        return [self._read(f"output {p.name!r}", p.buffer) for p in self.program.outputs]

    def _begin(self, inputs: Sequence[np.ndarray], infeeds: Sequence[np.ndarray], budget: Budget | None) -> None:
        """The memory as a launch finds it."""
        program, hbm = self.program, self._hbm
        check_arguments(program, inputs, infeeds)
        hbm.clear()
        for c in program.constants:
            b = program.buffers[c.buffer]
            hbm.write(c.buffer, np.frombuffer(c.data, b.dtype.numpy).reshape(b.shape))
        for port, x in zip(program.inputs, inputs, strict=True):
            hbm.write(port.buffer, x)
        self._budget, self._work = budget, 0 if budget is None else budget.start
        self._items = [len(x) for x in infeeds]
        self._infeeds, self.sent = [iter(x) for x in infeeds], [[] for _ in program.outfeeds]

    def _blocks(self, code: Sequence[Block], path: str) -> None:
        for n, block in enumerate(code):
            _BLOCKS[type(block)](self, block, f"{path}{n}")

    def _read(self, where: str, buffer: int) -> np.ndarray:
        """A copy of a buffer that must be written."""
        if not self._hbm.is_written(buffer):
            raise HazardError(f"{where}: buffer {buffer} is read before all of it was written, or after another buffer overwrote it.")
        return self._hbm.array(buffer).copy()

    def _kernel(self, block: Kernel, path: str) -> None:
        plan = self._plans.get(id(block))
        if plan is None:
            plan = self._plans[id(block)] = KernelPlan(block, self._on_chip, self._hbm)
        run = Run(plan, path, self._arithmetic, self._kept)
        try:
            run.execute(self.schedule)
        except (HazardError, LaunchError):
            raise
        except Exception as error:
            error.add_note(f"while executing {kernel_place(path, block)}")
            raise

    def _loop(self, block: Loop, path: str) -> None:
        for _ in range(self._trips(block, path)):
            self._count(block)
            self._blocks(block.body, f"{path}.body.")

    def _trips(self, block: Loop, path: str) -> int:
        return int(self._read(f"loop {path}", block.trips))

    def _while(self, block: While, path: str) -> None:
        while True:
            self._count(block)
            self._blocks(block.condition, f"{path}.condition.")
            if not self._read(f"while {path}", block.predicate):
                return
            self._blocks(block.body, f"{path}.body.")

    def _count(self, block: Loop | While) -> None:
        """Add what a trip of a loop costs, if only the run knows how many there are."""
        if self._budget is not None and id(block) in self._prices:
            self._work += self._budget.trips[self._prices[id(block)][0]]
            if self._work > self._budget.limit:
                raise OutOfBudget

    def _switch(self, block: Switch, path: str) -> None:
        branch = min(max(0, int(self._read(f"switch {path}", block.index))), len(block.branches) - 1)
        self._blocks(block.branches[branch], f"{path}.branch{branch}.")

    def _infeed(self, block: Infeed, path: str) -> None:
        item = next(self._infeeds[block.port], None)
        if item is None:
            raise run_dry(self.program.infeeds, self._items)
        self._hbm.write(block.buffer, item)

    def _outfeed(self, block: Outfeed, path: str) -> None:
        self.sent[block.port].append(self._read(f"outfeed {path}", block.buffer))


_BLOCKS: dict[type, Callable[..., None]] = {
    Kernel: ReferenceEngine._kernel,
    Loop: ReferenceEngine._loop,
    While: ReferenceEngine._while,
    Switch: ReferenceEngine._switch,
    Infeed: ReferenceEngine._infeed,
    Outfeed: ReferenceEngine._outfeed,
}


def stacked(port: Port, items: list[np.ndarray]) -> np.ndarray:
    """Items that an outfeed port sent, as one array."""
    return np.stack(items) if items else np.empty((0, *port.shape), port.dtype.numpy)
