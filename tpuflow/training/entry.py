"""`tpuflow.train`: a model, data, a policy and an optimizer, trained on the simulated device."""

from __future__ import annotations

import os
import sys

from tpuflow.jaxprs.processes import is_first
from tpuflow.training.callbacks.base import check_callbacks
from tpuflow.training.checkpoints import orbax_files
from tpuflow.training.checkpoints.missing import warn_no_checkpoint
from tpuflow.training.checkpoints.progress_schema import check_progress
from tpuflow.training.config import TrainConfig, configured
from tpuflow.training.preparing import prepare
from tpuflow.training.result import TrainResult, check_writable
from tpuflow.training.training_loop import Training

RAISES = """
ConfigError: an option is unknown or does not fit.
CheckpointError: no checkpoint is good, one cannot be written, or it was saved by another training.
DataError: the data are empty or do not fit the model or the loss; `error.result` holds what was trained before, if anything.
PeerError: another process of a training under `jax.distributed` is gone; what was saved last is there to go on from.
UnsupportedPrimitiveError: the step uses something the device's compiler has no rule for.
"""


@configured(TrainConfig, RAISES)
def train(config: TrainConfig) -> TrainResult:
    """Train a model on the simulated device."""
    config.check()
    if config.json is not None:
        check_writable(config.json)
    checked = check_callbacks(config.callbacks)
    checkpoint = None if config.resume is None else orbax_files().read_newest(config.resume, check_progress)
    job = prepare(config)
    training = Training(job, checked)
    said = [f"{name} {why}" for name, why in job.chosen.items()]
    if checkpoint is not None:
        training.restore(checkpoint)
        said.append(f"resumed from {checkpoint.path}")
    elif config.resume is not None:
        warn_no_checkpoint(config.resume, checked)
        said.append(f"no checkpoint in {os.fspath(config.resume)} yet, so training starts from the beginning")
    if config.progress and said and is_first():
        print(f"tpuflow.train: {', '.join(said)}", file=sys.stderr, flush=True)
    result = training.run(progress=config.progress)
    if config.json is not None and is_first():
        result.to_json(config.json)
    return result
