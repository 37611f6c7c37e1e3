"""The host side of the device: load a Program, choose an engine, launch it, count round trips."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from tpuflow.device.budget import Budget, OutOfBudget, Workload
from tpuflow.device.host_memory import refuse_memory
from tpuflow.device.interrupts import defer_interrupts
from tpuflow.device.launching import check_arguments, check_sent
from tpuflow.device.limits import Limits, host_bytes, items_bytes
from tpuflow.device.profile import KernelRow, profile
from tpuflow.device.timing import Calibration, ProgramTime, time_program
from tpuflow.device.verify.kept import verify_once
from tpuflow.errors import ConfigError, LaunchError, listed
from tpuflow.garbage import undisturbed
from tpuflow.isa import file
from tpuflow.isa.calls import deliver
from tpuflow.isa.program import Loop, Program
from tpuflow.jaxprs.compat import computes_plainly

ENGINES = ("fast", "reference")
FIDELITIES = ("native", "bitexact")

OnSlice = Callable[[list[Any], list[np.ndarray], int], None]
"""Called after each slice with the outputs so far, the outfeed items of the slice, stacked, and its number of trips."""


class Executable:
    """A Program loaded on the simulated device.

    Args:
      program: a Program, or the bytes of a .tpx file.
      engine: "fast" (XLA:CPU) or "reference" (NumPy, tile by tile, all checks).
      fidelity: "native" or "bitexact"; the reference engine is always bit-exact.
      limits: what a launch may take; may be changed between launches.
      device: a device of a CPU client of one's own for the fast engine, which then takes and gives arrays of that device, and does not go
        through JAX's dispatch; None for JAX's default backend. There, under `jax.distributed`, the chips of a mesh are divided over the
        processes, all of which must make and launch the same executables in the same order.

    Raises:
      ProgramError: the verifier refuses the Program.
      ConfigError: unknown engine or fidelity; under `jax.distributed`, a mesh that does not divide over the processes, or processes with
        different Programs.
    """

    def __init__(
        self,
        program: Program | bytes,
        engine: str = "fast",
        fidelity: str = "native",
        limits: Limits | None = None,
        device: Any = None,
    ):
        _one_of("engine", engine, ENGINES)
        _one_of("fidelity", fidelity, FIDELITIES)
        self.program = file.from_bytes(program) if isinstance(program, bytes) else program
        self.engine_name, self.fidelity = engine, fidelity
        self.limits = Limits() if limits is None else limits
        self.round_trips = 0
        self._times: dict[Any, ProgramTime] = {}
        self._paces: dict[int, Any] = {}
        self._allowed: Limits | None = None
        """Limits that every launch is known to keep, set after the first launch of a short Program: each takes the same work and memory."""
        verify_once(self.program)
        self._workload = Workload(self.program)
        self._engine = _make_engine(self.program, engine, fidelity, device)

    @classmethod
    def load(cls, path: str | os.PathLike[str], engine: str = "fast", fidelity: str = "native", limits: Limits | None = None) -> Executable:
        """Load a .tpx file.

        Raises:
          ProgramFileError: the file is cut short, damaged, of another version, or not a Program.
        """
        return cls(file.load(Path(path)), engine, fidelity, limits)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained .tpx file, atomically."""
        file.save(self.program, Path(path))

    @property
    def tiers(self) -> dict[str, int]:
        """Tier of every kernel by its place in the program, once translated (fast engine only)."""
        return dict(self._engine.tiers)

    def profile(self) -> tuple[KernelRow, ...]:
        """A row for every kernel, with the tier it was translated in (0 before the first launch, and on the reference engine)."""
        return profile(self.program, self.tiers)

    def time(self, trips: Mapping[str, int] | None = None, round_trips: int = 1, calibration: Calibration | None = None) -> ProgramTime:
        """The modelled time of a launch (or of several); see `tpuflow.device.timing.time_program`."""
        key = (tuple(sorted((trips or {}).items())), round_trips, calibration)
        if key not in self._times:
            self._times[key] = time_program(self.program, trips, round_trips, calibration)
        return self._times[key]

    @undisturbed()
    def compile(self, infeed_items: int = 1) -> None:
        """Translate and compile now for the given number of infeed items (nothing to do on the reference engine).

        Raises:
          LimitError: a launch would take more memory than its limit.
        """
        self._check_memory(self.limits, infeed_items, self._capacity(infeed_items, None))
        if self.engine_name == "fast":
            self._engine.compile(infeed_items, self._capacity(infeed_items, None))

    def launch(
        self,
        inputs: Sequence[Any],
        infeeds: Sequence[Any] = (),
        start: int = 0,
        count: int | None = None,
        on_slice: OnSlice | None = None,
    ) -> tuple[list[Any], list[np.ndarray]]:
        """Run the Program once: one host round trip. If it has long loops it runs in slices (`fast/execution.py` says how long), and Ctrl-C
        ends it after the current slice; its results and the donated inputs are lost then, and the executable can be launched again.

        inputs: one array a port, in order (donated ones may be consumed). infeeds: one stacked array [items, ...] a port; the Program
        takes items from number `start` on. count: how many outfeed items to return (all that were
        sent if None); there is room for as many items as are fed, else for `count`, else for one.
        on_slice: for a Program that ends in a loop of `count` trips; called after every slice with (outputs, outfeed items, trips), those
        of a launch with fewer trips. The next slice overwrites the outputs. Ctrl-C is deferred during slices and raised between them,
        so nothing is lost that was reported.
        Returns (outputs, one stacked array [count, ...] an outfeed port).

        Raises:
          LaunchError: number, shape or type of an argument does not fit the signature, an infeed runs dry, or more items are sent than
            there is room for.
          LimitError: the launch takes more work or memory than `limits` allow (if it had to run to find out, donated inputs are lost).
          HostMemoryError: the host has not enough memory.
          PeerError: another process of a computation under `jax.distributed` is gone.
          KeyboardInterrupt: Ctrl-C; `LaunchAbandoned` where there is no cut within seconds.
        """
        check_arguments(self.program, inputs, infeeds)
        limits = self.limits
        items = infeeds[0].shape[0] if infeeds else None
        room = self._capacity(items, count)
        self._check_memory(limits, items or 0, room)
        work = self._workload.work(inputs)
        limits.check_work(work.least)
        if self._engine.short and on_slice is None:
            self._allowed = None if self._workload.trip_inputs else limits
            return self._once(inputs), []
        self.round_trips += 1
        budget = Budget.of(work, limits.work)
        try:
            execution = self._engine.start(inputs, infeeds, start, room, self._paces, budget)
            self._run_slices(execution, on_slice, count or 0)
            check_sent(self.program.outfeeds, execution.totals, room)
            if on_slice is None:
                self._call_host(execution.outfeeds)
            return execution.outputs, [x[:count] for x in execution.outfeeds[self.program.call_ports :]]
        except OutOfBudget:
            raise limits.exceeded() from None
        except (MemoryError, RuntimeError) as error:
            refuse_memory(self.program, error)
            raise

    def launch_fitting(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of `launch`, for JAX arrays that are known to fit the signature.

        Once a short Program has been launched under the same limits, it skips all checks.
        """
        return self._once(inputs) if self._allowed is self.limits else self.launch(inputs)[0]

    def direct(self, inputs: Sequence[Any]) -> Any:
        """What `launch_fitting` launches for such inputs, if that is a single executable (`fast.engine.Direct`) and a launch has shown that
        no later one under the same limits has to be checked; else None."""
        return self._engine.direct(inputs) if self._allowed is self.limits else None

    def launcher(self, inputs: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        """`launch_fitting`, after a launch with these inputs, for others of their types on their device: without JAX's dispatch, where that
        is possible."""
        direct = None if any(p.donated for p in self.program.inputs) else self.direct(inputs)
        if direct is None:
            return self.launch_fitting
        execute, handlers, zero = direct.execute, direct.handlers, direct.zero
        order = None if [*direct.order] == [*range(len(inputs))] else direct.order

        def launch(inputs: list[Any]) -> list[Any]:
            if self._allowed is not self.limits or not computes_plainly():
                return self.launch_fitting(inputs)
            self.round_trips += 1
            try:
                taken = inputs if order is None else [inputs[i] if i >= 0 else zero for i in order]
                return execute(taken).consume_with_handlers(handlers)
            except (MemoryError, RuntimeError) as error:
                refuse_memory(self.program, error)
                if any(x.is_deleted() for x in inputs):
                    return self.launch_fitting(inputs)  # JAX says which
                raise

        return launch

    def _once(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of a short Program, possibly still being computed."""
        self.round_trips += 1
        try:
            return self._engine.once(inputs)
        except (MemoryError, RuntimeError) as error:
            refuse_memory(self.program, error)
            raise

    def _run_slices(self, execution: Any, on_slice: OnSlice | None, count: int) -> None:
        """Run all pieces of an execution and report each slice of its last loop; without such a loop, the whole launch is one slice."""
        if on_slice is None:
            for _ in execution:
                pass
            return
        sliced = bool(self.program.code) and isinstance(self.program.code[-1], Loop)
        told, trips, own = 0, 0, self.program.call_ports
        with nullcontext() if sliced or not self._engine.consumes else defer_interrupts():
            while trips is not None:
                with defer_interrupts() if self._engine.consumes else nullcontext():
                    trips = next(execution, None)
                    if trips:
                        told += trips
                        on_slice(execution.outputs, execution.latest[own:], trips)
                        self._call_host(execution.latest)
            if not told:
                on_slice(execution.outputs, execution.outfeeds[own:], count)
                self._call_host(execution.outfeeds)

    def _call_host(self, sent: Sequence[np.ndarray]) -> None:
        """Make the Program's host calls with the outfeed items of their ports, step by step."""
        for item in zip(*sent[: self.program.call_ports], strict=True):
            deliver(self.program.calls, item)

    @functools.cached_property
    def _host_bytes(self) -> int:
        return host_bytes(self.program)

    def _check_memory(self, limits: Limits, items: int, room: int) -> None:
        feeds = items_bytes(self.program.infeeds, items) + items_bytes(self.program.outfeeds, room)
        limits.check_memory(self._host_bytes + feeds)

    def _capacity(self, items: int | None, count: int | None) -> int:
        if not self.program.outfeeds:
            return 0
        return max(1, items) if items is not None else 1 << max(0, (count or 1) - 1).bit_length()

    def run(self, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Run once with inputs by port name; outputs by port name.

        Raises:
          LaunchError: names, shapes or types do not fit, or the Program's ports cannot be told apart by their names.
        """
        self.check_names(arrays)
        outputs, _ = self.launch([np.asarray(arrays[p.name]) for p in self.program.inputs])
        return {p.name: np.asarray(x) for p, x in zip(self.program.outputs, outputs, strict=True)}

    def check_names(self, given: Collection[str]) -> None:
        """That the Program can be run once with inputs of these names.

        Raises:
          LaunchError: names are missing or unknown, two ports have one name, or the Program is fed by infeed ports.
        """
        program = self.program
        if program.infeeds:
            raise LaunchError(
                f"this program is fed by infeed ports {listed(p.name for p in program.infeeds)}: use launch() and give their items."
            )
        for what, ports in (("inputs", program.inputs), ("outputs", program.outputs)):
            twice = [name for name, count in Counter(p.name for p in ports).items() if count > 1]
            if twice:
                raise LaunchError(
                    f"{what} {listed(twice)} of the program have a name more than once: use launch(), which goes by their order."
                )
        names = [p.name for p in program.inputs]
        known, there = set(names), set(given)
        missing, extra = [n for n in names if n not in there], [n for n in given if n not in known]
        if missing or extra:
            raise LaunchError(
                f"inputs do not fit the program: missing {listed(missing)}, unknown {listed(extra)}; it takes {listed(names)}. Give "
                "every input by its name."
            )


def _make_engine(program: Program, engine: str, fidelity: str, device: Any) -> Any:
    if engine == "fast":
        from tpuflow.device.fast.cache import engine_for
        from tpuflow.device.fast.host import PinnedHost
        from tpuflow.device.fast.host_devices import host_of

        return engine_for(program, fidelity, host_of(program) if device is None else PinnedHost(device))
    from tpuflow.device.reference.adapter import ReferenceAdapter

    return ReferenceAdapter(program)


def _one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"unknown {what} {value!r}; choose one of {', '.join(allowed)}.")
