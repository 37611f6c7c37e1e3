"""`tpuflow.estimate` and `tpuflow.estimate_training`: the modelled time and memory of a step on a chip, from shapes alone."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax

from tpuflow import amp
from tpuflow.checking import check_number, check_path
from tpuflow.chips import Chip, get_chip
from tpuflow.compiler import compile_sink
from tpuflow.data.batching import as_batch, names_of
from tpuflow.device.timing import Calibration, ProgramTime, get_calibration, time_program
from tpuflow.device.timing.prices import PICOSECONDS
from tpuflow.device.timing.program import sink_time
from tpuflow.device.timing.result import joules_text, seconds_text
from tpuflow.errors import ConfigError
from tpuflow.garbage import undisturbed
from tpuflow.isa.program import Program
from tpuflow.reports.profile import Profile
from tpuflow.reports.profile import profile as make_profile
from tpuflow.reports.reported import Reported
from tpuflow.stages.analysis import MemoryAnalysis, cost_analysis, memory_analysis
from tpuflow.stages.flattening import leaf_names
from tpuflow.stages.nnx_objects import jit_of
from tpuflow.stages.tracing import users_code
from tpuflow.training.adapters.model import MISFITS
from tpuflow.training.config import StepConfig, configured, option
from tpuflow.training.descriptions import DEFAULT_OPTIMIZER, describe_optimizer
from tpuflow.training.mismatches import types_text
from tpuflow.training.preparing import make_recipe, samples_of, trace_step
from tpuflow.training.train_step import Recipe, TrainState

Calibrated = str | os.PathLike[str] | Calibration | None
"""A calibration as users give it: itself, its file, or None for what tpuflow has for the chip's family."""
AS_SHAPES = "jax.ShapeDtypeStruct(shape, dtype)"
SINK_STEPS = 100  # steps a round trip that an estimate counts on, if nothing else is said


@dataclass(frozen=True, slots=True)
class Estimate(Reported):
    """The modelled cost of `steps` runs of a function in one host round trip; no value was ever computed.

    `batch_size` and `optimizer` (a description) are None and "" for a function that is no training step.
    """

    name: str
    chip: Chip
    policy: str
    steps: int
    time: ProgramTime
    memory: MemoryAnalysis
    program: Program = dataclasses.field(repr=False, compare=False)
    batch_size: int | None = None
    optimizer: str = ""

    @property
    def step_seconds(self) -> float:
        """Time of one step, with its share of the host's round trip."""
        return self.time.seconds / self.steps

    @property
    def step_joules_at_most(self) -> float | None:
        """Energy of one step if the chip drew its greatest power all the time; None if its row has no power."""
        whole = self.time.joules_at_most
        return None if whole is None else whole / self.steps

    @property
    def fits(self) -> bool:
        """Whether the chip's HBM holds it (compiling refuses what does not fit)."""
        return self.memory.peak_memory_in_bytes <= self.chip.available_hbm_bytes

    def profile(self) -> Profile:
        """Tables of layers, kernels and queues, and the memory's timeline."""
        batch = "" if self.batch_size is None else str(self.batch_size)
        settings = {"policy": self.policy, "batch": batch, "optimizer": self.optimizer}
        return make_profile(self.program, self.time, name=self.name, steps=self.steps, settings=settings)

    def report(self, kernels: int = 0) -> str:
        """A few lines of text, and the kernels that take longest if a number is given."""
        peak, there = self.memory.peak_memory_in_bytes, self.program.host_bytes
        energy = "" if self.step_joules_at_most is None else f", at most {joules_text(self.step_joules_at_most)}"
        where = f"{self.name} on {self.chip.name}{f' in {self.policy}' if self.policy else ''}"
        lines = [
            f"{where}: {seconds_text(self.step_seconds)}{energy} a step, {self.steps} steps a round trip",
            self.time.summary(self.steps),
            f"memory {peak / 2**20:.1f} MiB of {self.chip.available_hbm_bytes / 2**20:.0f}: arguments "
            f"{self.memory.argument_size_in_bytes / 2**20:.1f}, temporaries {self.memory.temp_size_in_bytes / 2**20:.1f}, constants "
            f"{self.memory.constant_size_in_bytes / 2**20:.1f}" + (f"; at the host {there / 2**20:.1f}" if there else ""),
        ]
        return "\n".join([*lines, self.time.table(kernels, self.steps)] if kernels else lines)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data; time, energy and work are of one step, but for those of `round_trip`."""
        t, steps = self.time, self.steps
        return {
            "name": self.name,
            "chip": self.chip.name,
            "fit": t.calibration.fit,
            "policy": self.policy,
            "batch_size": self.batch_size,
            "optimizer": self.optimizer,
            "steps": steps,
            "step_seconds": self.step_seconds,
            "power_watts": self.chip.power_watts or None,
            "step_joules_at_most": self.step_joules_at_most,
            "mfu": t.mfu,
            "overlap": t.overlap,
            "intensity": t.intensity,
            "host_seconds": t.launch_picoseconds / PICOSECONDS / steps,
            "feed_seconds": t.feed_picoseconds / PICOSECONDS / steps,
            "busy_seconds": {queue: seconds / steps for queue, seconds in t.busy_seconds.items()},
            "bound_seconds": {queue: seconds / steps for queue, seconds in t.by_bound().items()},
            "assumed": list(t.assumed),
            "narrowed": list(t.narrowed),
            **{what: amount / steps for what, amount in cost_analysis(self.program, t).items()},
            "round_trip": {"seconds": t.seconds, "joules_at_most": t.joules_at_most},
            **self.memory.as_dict(),
        }


@undisturbed()
def estimate(
    fun: Callable[..., Any],
    *args: Any,
    chip: str | Chip = "generic",
    policy: str | amp.Policy | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    calibration: Calibrated = None,
    **kwargs: Any,
) -> Estimate:
    """The modelled time and memory of one call of `fun` on a chip, from the shapes of its arguments.

    args, kwargs: arrays or `jax.ShapeDtypeStruct`s (trees of them), or nnx objects, as for `tpuflow.nnx.jit`. calibration: the timing
    model's fitted constants, a `tpuflow.Calibration` or a .toml file with one; what tpuflow has for the chip's family if None. The other
    options are those of `tpuflow.jit`. Nothing is run and no array is made.

    Raises:
      UnsupportedPrimitiveError, OutOfMemoryError, ConfigError: as compiling does.
    """
    row, constants = get_chip(chip), _calibration(calibration)
    for place, given in enumerate(args):
        if isinstance(given, tuple) and given and all(type(n) is int for n in given):
            raise ConfigError(
                f"argument {place}: {given} is a tuple of numbers and no array; for an array of that shape, give {AS_SHAPES}."
            )
    jit = jit_of((args, kwargs))
    function = jit(fun, chip=row, policy=policy, donate_argnums=donate_argnums, static_argnums=static_argnums)
    program = function.program(*args, **kwargs)
    name = getattr(fun, "__name__", type(fun).__name__)
    return Estimate(name, row, _policy_name(policy), 1, time_program(program, calibration=constants), memory_analysis(program), program)


@dataclass(frozen=True, slots=True)
class EstimateConfig(StepConfig):
    """The options of `tpuflow.estimate_training`; the data are the shapes and types of one batch."""

    _: KW_ONLY
    sink_size: int = option(SINK_STEPS, "steps a round trip; 0 counts as 1.", lambda name, value: check_number(name, value, 0))
    calibration: Calibrated = option(None, "as of `tpuflow.estimate`.")


@undisturbed()
@configured(EstimateConfig, "UnsupportedPrimitiveError, OutOfMemoryError, ConfigError: as `tpuflow.train` does.")
def estimate_training(config: EstimateConfig) -> Estimate:
    """The modelled time and memory of the training step that `tpuflow.train` would run, sunk `sink_size` steps at a time."""
    config.check()
    row, constants, steps = get_chip(config.chip), _calibration(config.calibration), max(1, config.sink_size)
    recipe, program, state = training_program(config, row)
    return Estimate(
        name=recipe.name,
        chip=row,
        policy=recipe.policy.name,
        steps=steps,
        time=sink_time(program, steps, calibration=constants),
        memory=memory_analysis(program),
        program=program,
        batch_size=samples_of(as_batch(config.data)),
        optimizer=DEFAULT_OPTIMIZER if config.optimizer is None else describe_optimizer(state.opt_state),
    )


def training_program(config: StepConfig, chip: Chip) -> tuple[Recipe, Program, TrainState]:
    """(the recipe of the step that `tpuflow.train` would run, the Program of its sink, compiled from shapes, the shapes of its state)."""
    batch = as_batch(config.data)
    recipe = make_recipe(config, batch)[0]
    told = f"model {recipe.name} and its loss, for batches of {types_text(batch)}"

    def refusal(said: str) -> ConfigError:
        return ConfigError(f"{told}: {said} Give the shapes and types of a batch that they take.")

    with users_code(f"while tracing {told}", MISFITS, refusal), jax.disable_jit(False):
        step = trace_step(recipe, batch)
    carries = leaf_names(step.state)
    program = compile_sink(
        step.jaxpr,
        carries=len(carries),
        chip=chip,
        name="train_step",
        carry_names=carries,
        infeed_names=names_of(batch, pair=True),
        outfeed_names=leaf_names(step.results[1]),
        host_carries=step.recipe.at_host(step.state),
    )
    return step.recipe, program, step.state


def _calibration(calibration: Calibrated) -> Calibration | None:
    if calibration is not None and not isinstance(calibration, Calibration):
        check_path("calibration", calibration)
    return None if calibration is None else get_calibration(calibration)


def _policy_name(policy: str | amp.Policy | None) -> str:
    return policy.name if isinstance(policy, amp.Policy) else policy or ""
