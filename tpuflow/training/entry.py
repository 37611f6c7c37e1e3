"""`tpuflow.train`: a Flax model, data, a policy and an optimizer, trained on the simulated device."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import optax

from tpuflow import amp
from tpuflow.chips import Chip
from tpuflow.training.callbacks.base import Callback, check_callbacks
from tpuflow.training.checkpoints import orbax_files
from tpuflow.training.checkpoints.progress_form import check_progress
from tpuflow.training.losses import Loss, LossFunction
from tpuflow.training.metrics import Metric, MetricFunction
from tpuflow.training.preparing import Options, prepare
from tpuflow.training.result import TrainResult, check_writable
from tpuflow.training.running import Training


def train(
    model: Any,
    data: Any,
    policy: str | amp.Policy = "fp32",
    optimizer: optax.GradientTransformation | None = None,
    loss: str | Loss | LossFunction | None = None,
    *,
    epochs: int = 1,
    batch_size: int | None = None,
    sink_size: int = -1,
    eval_data: Any = None,
    eval_epochs: int | None = None,
    eval_steps: int | None = None,
    chip: str | Chip = "generic",
    seed: int = 0,
    params: Any = None,
    keep_batchnorm_fp32: bool | None = None,
    loss_scale: amp.LossScale | float | str | None = None,
    accumulate_steps: int = 1,
    metrics: Sequence[str | Metric | MetricFunction] | None = None,
    shuffle: bool = False,
    numerics: bool | int = False,
    callbacks: Sequence[Callback] = (),
    resume: str | os.PathLike[str] | None = None,
    engine: str = "fast",
    fidelity: str = "native",
    progress: bool = True,
    json: str | os.PathLike[str] | None = None,
) -> TrainResult:
    """Train a linen or nnx module on the simulated device.

    Args:
      model: a `flax.linen.Module` or `flax.nnx.Module` instance that maps inputs [B, ...] to outputs.
      data: arrays (inputs [N, ...], labels [N, ...]), an iterable of such batches, a function that makes one, or a loader.
      policy: precision, a name of `tpuflow.amp.POLICIES` or a `Policy` of your own.
      optimizer: an Optax transformation; adam(1e-3) if not given.
      loss: a name of `tpuflow.LOSSES`, `tpuflow.cross_entropy(label_smoothing=...)`, or a function (fp32 outputs, labels) -> loss;
        chosen by the labels if not given: softmax cross-entropy for integers, mean squared error for floats.
      epochs: passes over the data; with a positive `sink_size`, sinks.
      batch_size: samples a step, 32 if not given; the last batch of an epoch may be smaller. Iterables bring their own batches.
      sink_size: steps in one host round trip: -1 a whole epoch; 0 one; k > 0: the data are walked endlessly, k batches an epoch.
      eval_data: as `data`; evaluated on the device, by default after each epoch.
      eval_epochs: evaluate after every so many epochs.
      eval_steps: evaluate after every so many steps, counted over the whole training; a sink that goes on beyond is split there, which
        changes no value. With `eval_steps` alone there is no evaluation after each epoch.
      chip: a row of the catalogue.
      seed: of initial parameters, of shuffling, of the model's random numbers.
      params: parameters to start from instead: a tree (for linen, with or without {"params": ...}, and with batch statistics and the like
        if they are given too), or the path of a checkpoint or file that `tpuflow.load_params` reads.
      keep_batchnorm_fp32: batch normalisation in fp32 (True) or in the policy's compute type (False); as the policy says if not given.
      loss_scale: in place of the policy's: a number (static), "dynamic", "none", or a `LossScale`.
      accumulate_steps: steps for one update: it takes the mean of their gradients, summed in fp32. Each step counts the same, also
        one of a ragged batch; statistics of batch normalisation move every step; what a training ends with before an update is due
        stays in `opt_state` and changes no parameter. Schedules count updates.
      metrics: what to measure on `eval_data`: names of `tpuflow.METRICS`, functions (fp32 outputs, labels) -> values, or `Metric`s;
        the loss, and the accuracy for class labels, if not given.
      shuffle: a new order of the samples in each epoch (arrays only).
      numerics: report what happens to every number of a step (see `tpuflow.check_numerics`) before every epoch and after the last;
        a number n: before the first and after every n-th step. What is measured is a step beside the training, on the first batch of
        the data each time; it changes no value. The reports are in `result.numerics`.
      callbacks: see `tpuflow.Callback`.
      resume: a directory where `tpuflow.ModelCheckpoint` saves, or one checkpoint in it. The training goes on from the newest good
        checkpoint, bit for bit as if it had never stopped; without any, it starts from the beginning, so the same call can be repeated
        until it has ended. Data, model, policy, loss and optimizer must be the same; `epochs` and `sink_size` may change.
      engine, fidelity: how the device is simulated, see `tpuflow.device`.
      progress: show a progress bar, and say what was chosen.
      json: write the result there; checked before the training starts.

    Raises:
      ConfigError: an option is unknown or does not fit.
      CheckpointError: no checkpoint is good, one cannot be written, or it was saved by another training.
      DataError: the data are empty or do not fit the model or the loss; `error.result` holds what was trained before, if anything.
      UnsupportedPrimitiveError: the step uses something the device's compiler has no rule for.
    """
    if json is not None:
        check_writable(json)
    options = Options(
        model=model,
        data=data,
        eval_data=eval_data,
        policy=policy,
        optimizer=optimizer,
        loss=loss,
        epochs=epochs,
        batch_size=batch_size,
        sink_size=sink_size,
        chip=chip,
        seed=seed,
        params=params,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        loss_scale=loss_scale,
        accumulate_steps=accumulate_steps,
        metrics=metrics,
        shuffle=shuffle,
        engine=engine,
        fidelity=fidelity,
        eval_epochs=eval_epochs,
        eval_steps=eval_steps,
        numerics=numerics,
    )
    checked = check_callbacks(callbacks)
    checkpoint = None if resume is None else orbax_files().read_newest(resume, check_progress)
    job = prepare(options)
    training = Training(job, checked)
    said = [f"{name} {why}" for name, why in job.chosen.items()]
    if checkpoint is not None:
        training.restore(checkpoint)
        said.append(f"resumed from {checkpoint.path}")
    elif resume is not None:
        said.append(f"no checkpoint in {os.fspath(resume)} yet, so training starts from the beginning")
    if progress and said:
        print(f"tpuflow.train: {', '.join(said)}", file=sys.stderr, flush=True)
    result = training.run(progress=progress)
    if json is not None:
        result.to_json(json)
    return result
