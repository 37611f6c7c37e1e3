"""A training and its evaluation, from options and a job."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

import tpuflow
from train.pipeline import Batches, Loader
from train.recipe import StopAfter
from train.trainer import folders
from train.trainer.folders import ModelFolders
from train.trainer.lines import TrainerLines, length
from train.trainer.optimizers import decayed, optimizer
from train.trainer.options import TrainerOptions


class Start(Protocol):
    """What a training begins with, and how what comes of it is written."""

    @property
    def model(self) -> Any:
        """What `tpuflow.train` trains."""
        ...

    @property
    def variables(self) -> Any:
        """Its variables; None: new ones."""
        ...

    def save_checkpoint(self, checkpoint: Path, folder: Path) -> None:
        """Write the model as it is in a checkpoint into an existing folder."""
        ...

    def save_result(self, result: Any, folder: Path) -> None:
        """Write the model as `tpuflow.train` returned it into an existing folder."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained on what: a model, training and evaluation data (None: none), the loss and what is measured.

    data: arrays, or a walk over batches. ema: the average of the parameters that is kept. decayed: which leaves have weight decay; None:
    all. callbacks: what else happens on the way.
    """

    start: Start
    data: Any
    eval_data: Any
    loss: Any = None
    loss_fn: Any = None
    metrics: Sequence[tpuflow.Metric] | None = None
    ema: tpuflow.EMA | None = None
    decayed: Callable[[Any], Any] | None = decayed
    callbacks: Sequence[tpuflow.Callback] = ()

    @property
    def samples(self) -> int:
        """Samples of a pass over the training data."""
        batches = self.data.batches if isinstance(self.data, Loader) else None
        return len(batches.inputs if isinstance(batches, Batches) else jax.tree.leaves(self.data)[0])


def run_job(options: TrainerOptions, job: Job, summary: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> Any:
    """Train and evaluate as the options ask for; what `tpuflow.train` returned, or None."""
    result = train(options, job) if options.do_train else None
    if options.do_eval and not (result is not None and result.interrupted):
        evaluate(options, job, result, summary)
    return result


def train(options: TrainerOptions, job: Job) -> Any:
    """Train; the model, its checkpoints, figures and log are then in the output folder."""
    plan, resume, folder = length(options, job.samples), folders.beginning(options), folders.output_folder(options)
    saver = tpuflow.ModelCheckpoint(
        folder / folders.CHECKPOINTS, every_steps=options.save_steps * plan.accumulate, keep=options.save_total_limit
    )
    lines = TrainerLines(options, plan)

    def write(checkpoint: Path, target: Path) -> None:
        folders.write_atomically(target, partial(job.start.save_checkpoint, checkpoint))

    started = time.perf_counter()
    result = tpuflow.train(
        job.start.model,
        job.data,
        **step_options(options, job),
        optimizer=optimizer(options, plan.updates, job.decayed),
        params=job.start.variables,
        ema=job.ema,
        accumulate_steps=plan.accumulate,
        epochs=math.ceil(plan.steps / (options.sink_size if options.sink_size > 0 else plan.steps_per_epoch)),
        batch_size=options.per_device_train_batch_size,
        sink_size=options.sink_size,
        shuffle=not isinstance(job.data, Loader),
        eval_data=job.eval_data if options.eval_steps else None,
        eval_steps=options.eval_steps and options.eval_steps * plan.accumulate,
        metrics=job.metrics if options.eval_steps else None,
        callbacks=(lines, StopAfter(plan.steps), *job.callbacks, saver, ModelFolders(saver, write, options)),
        resume=resume,
        progress=options.progress,
    )
    seconds = time.perf_counter() - started
    folders.write_json(folder / "trainer_state.json", {"global_step": result.steps // plan.accumulate, "log_history": lines.log})
    if not result.interrupted:
        folders.replace_files(folder, partial(job.start.save_result, result))
        folders.report(options, "train", {
            "epoch": round(plan.steps / plan.steps_per_epoch, 2), "train_loss": float(np.mean(result.losses)), "train_samples": job.samples,
            "train_runtime": seconds, "train_steps_per_second": plan.updates / seconds,
        })  # fmt: skip
    return result


def evaluate(options: TrainerOptions, job: Job, result: Any, summary: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Measure the trained model, or the one that was given, and report it."""
    started = time.perf_counter()
    figures = tpuflow.evaluate(
        job.start.model,
        job.eval_data,
        **step_options(options, job),
        params=job.start.variables if result is None else result.variables,
        batch_size=options.per_device_eval_batch_size,
        metrics=job.metrics,
        progress=options.progress,
    )
    seconds = time.perf_counter() - started
    named = {f"eval_{name}": value for name, value in figures.items()}
    samples = len(jax.tree.leaves(job.eval_data)[0])
    folders.report(options, "eval", summary({**named, "eval_samples": samples, "eval_runtime": seconds}))


def step_options(options: TrainerOptions, job: Job) -> dict[str, Any]:
    """The options of a step that training and evaluation share."""
    device = {name: getattr(options, name) for name in ("seed", "chip", "engine", "fidelity")}
    return {"policy": options.precision, "loss": job.loss, "loss_fn": job.loss_fn, **device}
