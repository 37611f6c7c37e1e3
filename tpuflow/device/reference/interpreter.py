"""The reference engine: all chips of a Program's mesh in lockstep, meeting at every collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tpuflow.device.budget import Budget, Workload
from tpuflow.device.launching import check_arguments
from tpuflow.device.reference.chip import ChipRun, Meeting
from tpuflow.device.shards import shard, unshard
from tpuflow.device.verify import verify as verify_program
from tpuflow.errors import ConfigError, HazardError
from tpuflow.isa.arithmetic import Arithmetic
from tpuflow.isa.collectives import KINDS, Await, Collective, chips_of, groups, position, sizes_of
from tpuflow.isa.numpy_arithmetic import NumpyArithmetic
from tpuflow.isa.program import CallHost, Port, Program

SCHEDULES = ("late", "early")


class ReferenceEngine:
    """Runs a Program tile by tile.

    Args:
      program: what to run.
      verify: check it first; without, the hazards of an invalid Program are found while it runs.
      schedule: DMA completes as "late" or as "early" as the semaphores allow, and so do messages between chips.
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
        workload = Workload(program)
        self.chips = [ChipRun(program, n, schedule, self._arithmetic, workload) for n in range(chips_of(program.mesh))]
        self._axes = frozenset(range(len(program.mesh)))
        self._places = [tuple(position(program.mesh, n, a) for a in range(len(program.mesh))) for n in range(len(self.chips))]

    def launch(
        self, inputs: Sequence[np.ndarray], infeeds: Sequence[np.ndarray] = (), budget: Budget | None = None
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Run once, from poisoned memory.

        inputs: one array a port. infeeds: one stacked array [items, ...] a port, taken from the first item on. budget: where it stops.
        Returns (one array an output port, one stacked array [items sent, ...] an outfeed port).

        Raises:
          HazardError: a machine-level fault, or chips that disagree about the next collective.
          LaunchError: the arguments do not fit the signature, or an infeed runs dry.
          OutOfBudget: the run does more work than the budget allows.
        """
        for _ in self.launch_in_slices(inputs, infeeds, budget):
            pass
        return self.outputs, [stacked(p, items) for p, items in zip(self.program.outfeeds, self.sent, strict=True)]

    def launch_in_slices(
        self, inputs: Sequence[np.ndarray], infeeds: Sequence[np.ndarray] = (), budget: Budget | None = None
    ) -> Iterator[int]:
        """Run as `launch` does, but pause after every trip of a loop that is the Program's last block, each time yielding 1.

        `sent` and `outputs` are up to date at every pause.
        """
        program, mesh = self.program, self.program.mesh
        check_arguments(program, inputs, infeeds)
        given = [shard(x, p.cut, mesh, self._axes) for p, x in zip(program.inputs, inputs, strict=True)]
        feeds = [shard(x, p.cut, mesh, self._axes, 1) for p, x in zip(program.infeeds, infeeds, strict=True)]
        for chip, place in zip(self.chips, self._places, strict=True):
            chip.begin([x[place] for x in given], [x[place] for x in feeds], budget)
        return self._pieces()

    @property
    def sent(self) -> list[list[np.ndarray]]:
        """The items that each outfeed port has sent so far."""
        if not self.program.mesh:
            return self.chips[0].sent
        ports = enumerate(self.program.outfeeds)
        return [[self._unsharded(p, items) for items in zip(*(c.sent[n] for c in self.chips), strict=True)] for n, p in ports]

    @property
    def outputs(self) -> list[np.ndarray]:
        """A copy of the present content of every output."""
        return [self._unsharded(p, self.pieces(n)) for n, p in enumerate(self.program.outputs)]

    def pieces(self, number: int) -> list[np.ndarray]:
        """The shard of an output on each chip."""
        return [chip.output(number) for chip in self.chips]

    def _unsharded(self, port: Port, pieces: Sequence[np.ndarray]) -> np.ndarray:
        if not self.program.mesh:
            return pieces[0]
        sizes = [axis.size for axis in self.program.mesh]
        return unshard(np.stack(pieces).reshape((*sizes, *port.shape)), port.cut, self.program.mesh, self._axes)

    def _pieces(self) -> Iterator[int]:
        runs = [chip.pieces() for chip in self.chips]
        while True:
            with np.errstate(all="ignore"):  # not across the yield: it would hold for whoever is told
                met = [next(run, None) for run in runs]
                first = self._agreed(met)
                if first is None:
                    return
                if isinstance(first.block, Collective):
                    for chip in self.chips:
                        chip.start(first.block, first.path)
                elif isinstance(first.block, Await):
                    self._exchange(first.block, first.path)
                elif isinstance(first.block, CallHost):
                    self._ask(first.block, first.path)
            if first.block is None:
                yield 1

    def _agreed(self, met: Sequence[Meeting | None]) -> Meeting | None:
        """The rendezvous that all chips have reached; None if all have ended.

        Raises:
          HazardError: they have reached different ones.
        """
        for n, other in enumerate(met):
            if other != met[0]:
                raise HazardError(f"chips disagree about the next collective: chip 0 comes to {_text(met[0])}, chip {n} to {_text(other)}.")
        return met[0]

    def _exchange(self, block: Await, path: str) -> None:
        """Complete a collective: every member of every group receives what the collective's meaning makes of all its members' data."""
        c = self.chips[0].started(block, path)
        assert isinstance(c, Collective)
        kind, mesh, dtype = KINDS[c.kind], self.program.mesh, self.program.buffers[c.target].dtype
        for group in groups(mesh, c.axes):
            sent = self._arithmetic.load(np.stack([self.chips[n].message(c.semaphore) for n in group]), dtype)
            received = self._arithmetic.store(kind.meaning(c, self._arithmetic, sent, sizes_of(mesh, c.axes), dtype), dtype)
            for i, n in enumerate(group):
                self.chips[n].receive(c.semaphore, received if kind.alike else received[i])

    def _ask(self, block: CallHost, path: str) -> None:
        """Call the host once, for all chips."""
        asked = [chip.asking(block, path) for chip in self.chips]
        answer = self.program.functions[block.function].answer(asked[0])
        for chip in self.chips:
            chip.answer(block, answer)


def _text(meeting: Meeting | None) -> str:
    if meeting is None:
        return "the end"
    block = meeting.block
    what = f"{block.kind} over axes {list(block.axes)}" if isinstance(block, Collective) else "a wait" if block else "the end of a trip"
    where = f" ({block.where})" if isinstance(block, Collective) and block.where else ""
    return f"{what} at {meeting.path}{where}"


def stacked(port: Port, items: list[np.ndarray]) -> np.ndarray:
    """Items that an outfeed port sent, as one array."""
    return np.stack(items) if items else np.empty((0, *port.shape), port.dtype.numpy)
