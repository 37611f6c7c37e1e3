"""`tpuflow.check_numerics`: a training step in one or more precisions, with every operation's numbers measured on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optax

from tpuflow import amp
from tpuflow.checking import check_number
from tpuflow.chips import Chip
from tpuflow.errors import ConfigError
from tpuflow.numerics.collecting import report_of
from tpuflow.numerics.instrumenting import Instrumented, Measured, instrument
from tpuflow.numerics.report import NumericsComparison, NumericsReport
from tpuflow.numerics.scales import THRESHOLDS, scale_rows
from tpuflow.training.losses import Loss, LossFunction
from tpuflow.training.preparing import Job, Options, prepare

REFERENCE = "fp32"
"""The policy whose gradients the loss scales are judged by."""
HALF = "float16"
"""The type they are judged for where the policy itself computes in fp32."""


def check_numerics(
    model: Any,
    batch: Any,
    policy: str | amp.Policy | Sequence[str | amp.Policy] = "fp32",
    loss: str | Loss | LossFunction | None = None,
    optimizer: optax.GradientTransformation | None = None,
    *,
    steps: int = 1,
    params: Any = None,
    keep_batchnorm_fp32: bool | None = None,
    loss_scale: amp.LossScale | float | str | None = None,
    chip: str | Chip = "generic",
    seed: int = 0,
    engine: str = "fast",
    fidelity: str = "native",
) -> NumericsReport | NumericsComparison:
    """Run training steps on the simulated device and report what happens to every number on the way.

    The step is the one that `tpuflow.train` runs, operation by operation on the same types, with measurements beside it.

    Args:
      model: a `flax.linen.Module` or `flax.nnx.Module` instance.
      batch: (inputs [B, ...], labels [B, ...]), the data of every step.
      policy: a precision, or several of them to be compared: ("fp32", "fp16", "bf16", "mixed").
      loss, optimizer, params, keep_batchnorm_fp32, loss_scale, chip, seed, engine, fidelity: as for `tpuflow.train`.
      steps: how many steps; their figures are added up.

    Returns:
      A `NumericsReport`; for several policies a `NumericsComparison` of them.

    Raises:
      ConfigError, DataError, UnsupportedPrimitiveError: as `tpuflow.train` does.
    """
    check_number("steps", steps, 1)
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ConfigError(f"check_numerics: expected one batch, (inputs, labels), got {type(batch).__name__}.")
    several = isinstance(policy, (tuple, list))
    policies: Sequence[Any] = policy if several else [policy]  # type: ignore[assignment]
    if not policies:
        raise ConfigError(f"check_numerics: no policy given; choose from: {', '.join(amp.POLICIES)}.")

    given = params

    def job(one: str | amp.Policy, *, scaled: bool = True) -> Job:
        options = Options(
            model=model,
            data=tuple(batch),
            eval_data=None,
            policy=one,
            optimizer=optimizer,
            loss=loss,
            epochs=1,
            batch_size=max(1, len(batch[0])),
            sink_size=-1,
            chip=chip,
            seed=seed,
            params=given,
            shuffle=False,
            engine=engine,
            fidelity=fidelity,
            keep_batchnorm_fp32=keep_batchnorm_fp32 if scaled else None,
            loss_scale=loss_scale if scaled else None,
        )
        return prepare(options)

    reference = job(REFERENCE, scaled=False)
    given = _variables(reference) or params
    jobs = [job(one) for one in policies]
    runs = [_run(j, steps) for j in jobs]
    judge = next((run for j, run in zip(jobs, runs, strict=True) if _is_reference(j)), None) or _run(reference, 1)
    reports = [_report(j, run, judge) for j, run in zip(jobs, runs, strict=True)]
    return NumericsComparison(tuple(reports)) if several else reports[0]


def _is_reference(job: Job) -> bool:
    """Whether a job's gradients are those that loss scales are judged by: computed in fp32, not scaled."""
    policy = job.recipe.policy
    return (policy.param_dtype, policy.casts, policy.loss_dtype, policy.loss_scale.kind) == ("float32", "none", "float32", "none")


def _variables(job: Job) -> Any:
    """What other policies start from; an nnx module brings its own."""
    state = job.state
    return {"params": state.params, **state.carried} if isinstance(state.carried, dict) else None


@dataclass(frozen=True, slots=True)
class Ran:
    """Steps that were run and measured."""

    step: Instrumented
    done: tuple[Measured, ...]


def _run(job: Job, steps: int) -> Ran:
    """So many steps from a job's initial state on its first batch."""
    batch = job.feed.first()
    step = instrument(job.recipe, job.state, batch, job.target, THRESHOLDS if _is_reference(job) else ())
    state, done = job.state, []
    for _ in range(steps):
        state, measured = step(state, batch)
        done.append(measured)
    return Ran(step, tuple(done))


def _report(job: Job, ran: Ran, judge: Ran) -> NumericsReport:
    policy = job.recipe.policy
    judged = HALF if policy.compute_dtype == "float32" else policy.compute_dtype
    scales = scale_rows(judge.step.sites, judge.done[0].counts, judged, loss_dtype=policy.loss_dtype)
    return report_of(job.settings, ran.step, ran.done, scales)
