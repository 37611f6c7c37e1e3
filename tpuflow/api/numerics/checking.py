"""`tpuflow.check_numerics`: a training step in one or more precisions, with every operation's numbers measured on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optax

from tpuflow import amp
from tpuflow.api.checking import check_number
from tpuflow.api.losses import Loss, LossFunction
from tpuflow.api.numerics.instrumenting import Instrumented, Measured, instrument
from tpuflow.api.numerics.measures import Counts
from tpuflow.api.numerics.report import NumericsComparison, NumericsReport, in_order
from tpuflow.api.numerics.rows import OperationRow, ScaleRow, TensorRow, UpdateRow, added, figures_of, grouped, total
from tpuflow.api.numerics.scales import THRESHOLDS, scale_rows
from tpuflow.api.numerics.walking import Site
from tpuflow.api.preparing import Job, Options, prepare
from tpuflow.chips import Chip
from tpuflow.errors import ConfigError

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


def report_of(settings: Any, step: Instrumented, done: Sequence[Measured], scales: Sequence[ScaleRow] = ()) -> NumericsReport:
    """The report of steps that were run and measured."""
    operations = [operation_row(site, [m.counts[i] for m in done]) for i, site in enumerate(step.sites)]
    return NumericsReport(
        settings=settings,
        losses=tuple(float(m.figures.loss) for m in done),
        loss_scales=tuple(float(m.figures.loss_scale) for m in done),
        skipped=tuple(bool(m.figures.skipped) for m in done),
        rows=in_order([*map(_tensor_row, operations), *_leaf_rows(step, done)]),
        operations=tuple(operations),
        updates=tuple(grouped(_update_rows(step, done), "layer", "parameter")),
        scales=tuple(scales),
    )


def operation_row(site: Site, counts: Sequence[Counts]) -> OperationRow:
    """The row of one operation from its figures in each step."""
    rows = []
    for number, one in enumerate(counts):
        born = np.flatnonzero(np.asarray(one.born).reshape(-1))
        first: dict[str, Any] = {"step": number, "trip": int(born[0])} if born.size else {}
        figures = figures_of(one, site.dtype)
        named = {
            name: getattr(site, name) for name in ("place", "loop", "primitive", "phase", "layer", "tensor", "source", "dtype", "shape")
        }
        rows.append(OperationRow(**figures, **named, born=total(one.born), **first))
    return added(sorted(rows, key=lambda row: row.step is None))


def _tensor_row(row: OperationRow) -> TensorRow:
    names = ("layer", "tensor", "dtype", "elements", "inf", "nan", "zeros", "subnormal", "underflow", "largest", "smallest")
    return TensorRow(**{name: getattr(row, name) for name in names})


def _leaf_rows(step: Instrumented, done: Sequence[Measured]) -> list[TensorRow]:
    """Parameters before each step; updates of the steps that had one."""
    rows = []
    for m in done:
        for leaf, counts in zip(step.leaves, m.leaf_counts, strict=True):
            rows.append(_leaf_row(leaf.layer, "parameter", leaf.dtype, counts.parameter))
            if m.updated:
                rows.append(_leaf_row(leaf.layer, "update", leaf.update_dtype, counts.update))
    return rows


def _leaf_row(layer: str, tensor: str, dtype: str, counts: Counts) -> TensorRow:
    return TensorRow(layer=layer, tensor=tensor, dtype=dtype, **figures_of(counts, dtype))


def _update_rows(step: Instrumented, done: Sequence[Measured]) -> list[UpdateRow]:
    rows = []
    for m in done:
        for leaf, counts in zip(step.leaves, m.leaf_counts, strict=True):
            found = {
                "elements": int(np.prod(leaf.shape, dtype=np.int64)),
                "with_gradient": int(counts.with_gradient),
                "lost": int(counts.lost),
                "vanished": int(counts.update.underflow),
            }
            counted = {name: value * m.updated for name, value in found.items()}
            rows.append(UpdateRow(layer=leaf.layer, parameter=leaf.name, dtype=leaf.dtype, **counted))
    return rows
