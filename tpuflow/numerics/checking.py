"""`tpuflow.check_numerics`: a training step in one or more precisions, with every operation's numbers measured on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from tpuflow import amp
from tpuflow.checking import check_number
from tpuflow.errors import ConfigError
from tpuflow.numerics.collecting import report_of
from tpuflow.numerics.instrumenting import InstrumentedStep, StepMeasurements, instrument
from tpuflow.numerics.report import NumericsComparison, NumericsReport
from tpuflow.numerics.scales import THRESHOLDS, scale_rows
from tpuflow.training.config import StepConfig, configured, option
from tpuflow.training.preparing import Job, prepare, single_batch_config
from tpuflow.training.train_step import Recipe

REFERENCE = "fp32"
"""The policy whose gradients the loss scales are judged by."""
HALF = "float16"
"""The type they are judged for where the policy itself computes in fp32."""


@dataclass(frozen=True, slots=True)
class NumericsConfig(StepConfig):
    """The options of `tpuflow.check_numerics`. `policy` may be several of them, to be compared: ("fp32", "fp16", "bf16", "mixed")."""

    _: KW_ONLY
    steps: int = option(1, "how many steps; their figures are added up.", lambda name, value: check_number(name, value, 1))


@configured(NumericsConfig, "ConfigError, DataError, UnsupportedPrimitiveError: as `tpuflow.train` does.")
def check_numerics(config: NumericsConfig) -> NumericsReport | NumericsComparison:
    """Run training steps on the simulated device and report what happens to every number on the way.

    The step is the one that `tpuflow.train` runs, operation by operation on the same types, with measurements beside it. The data are one
    batch, that of every step. Gives a `NumericsReport`; for a sequence of policies a `NumericsComparison` of them.
    """
    config.check()
    several = isinstance(config.policy, (tuple, list))
    policies: Sequence[Any] = config.policy if several else [config.policy]  # type: ignore[assignment]
    if not policies:
        raise ConfigError(f"check_numerics: no policy given; give one or more of: {', '.join(amp.POLICIES)}.")
    plain = replace(config, policy=REFERENCE, keep_batchnorm_fp32=None, loss_scale=None)
    reference = prepare(single_batch_config(plain))
    params = _variables(reference) or config.params
    jobs = [prepare(single_batch_config(replace(config, policy=one, params=params))) for one in policies]
    runs = [_run(j, config.steps) for j in jobs]
    reference_run = next((run for j, run in zip(jobs, runs, strict=True) if _is_reference(j)), None) or _run(reference, 1)
    reports = [_report(j, run, reference_run) for j, run in zip(jobs, runs, strict=True)]
    return NumericsComparison(tuple(reports)) if several else reports[0]


def _recipe(job: Job) -> Recipe:
    assert isinstance(job.recipe, Recipe)
    return job.recipe


def _is_reference(job: Job) -> bool:
    """Whether a job computes in fp32 without a loss scale, so that loss scales can be judged by its gradients."""
    policy = _recipe(job).policy
    return (policy.param_dtype, policy.casts, policy.loss_dtype, policy.loss_scale.kind) == ("float32", "none", "float32", "none")


def _variables(job: Job) -> Any:
    """The initial variables, with which the other policies start too; None for an nnx module, which has its own."""
    state = job.state
    return {"params": state.params, **state.carried} if isinstance(state.carried, dict) else None


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A step, and the measurements of each of its runs."""

    step: InstrumentedStep
    done: tuple[StepMeasurements, ...]


def _run(job: Job, steps: int) -> MeasuredRun:
    """Run and measure steps from a job's initial state, each on its first batch."""
    batch = job.first
    step = instrument(_recipe(job), job.state, batch, job.target, THRESHOLDS if _is_reference(job) else ())
    state, done = job.state, []
    for _ in range(steps):
        state, measured = step(state, batch)
        done.append(measured)
    return MeasuredRun(step, tuple(done))


def _report(job: Job, run: MeasuredRun, reference_run: MeasuredRun) -> NumericsReport:
    policy = _recipe(job).policy
    judged = HALF if policy.compute_dtype == "float32" else policy.compute_dtype
    scales = scale_rows(reference_run.step.sites, reference_run.done[0].counts, judged, loss_dtype=policy.loss_dtype)
    return report_of(job.settings, run.step, run.done, scales)
