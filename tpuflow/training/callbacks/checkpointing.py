"""`ModelCheckpoint`: saves the training while it runs, every so often or whenever a metric is best."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpuflow.checking import check_choice, check_path
from tpuflow.errors import CheckpointError, CheckpointWriteError
from tpuflow.jaxprs.processes import by_first, is_first
from tpuflow.training.callbacks.base import Callback, Run, check_every
from tpuflow.training.callbacks.watching import MODES, TRAINING_LOSS, Best
from tpuflow.training.checkpoints import orbax_files
from tpuflow.training.checkpoints.locking import not_written


class ModelCheckpoint(Callback):
    """Save the training in a directory, from which `tpuflow.train(..., resume=directory)` goes on bit for bit.

    directory: made if it does not exist. every_steps, every_epochs: how often; without either, and without `best`, every epoch. A sink
    that would go on beyond `every_steps` is split there, which changes no value. keep: checkpoints to keep, the oldest go first; None
    keeps all. best: a metric of the evaluation, or "loss"; whenever it is better than before, the training is saved, and the link `best`
    in the directory names that checkpoint, which is kept beside the others. mode: "min" or "max"; None: "min" for names with "loss" or
    "err" in them. When the training ends, or Ctrl-C ends it, it is saved once more.

    From its beginning to its end the training is the only one that may write in the directory: a second one is refused with a
    `CheckpointError` that names the first. A checkpoint that cannot be written, because the disk is full for example, ends no training:
    a warning says so, nothing half written stays behind, and the next save tries again.

    Of several processes (`jax.distributed`) the first one writes, and the others wait for it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_epochs: int | None = None,
        keep: int | None = 5,
        best: str | None = None,
        mode: str | None = None,
    ):
        for name, value in (("every_steps", every_steps), ("every_epochs", every_epochs), ("keep", keep)):
            check_every(f"ModelCheckpoint: {name}", value)
        check_path("ModelCheckpoint: directory", directory)
        if mode is not None:
            check_choice("mode of ModelCheckpoint", mode, MODES)
        self.directory, self.every_steps = Path(directory), every_steps
        self._every_epochs = 1 if every_steps is None and every_epochs is None and best is None else every_epochs
        self._keep = keep
        self._best = None if best is None else Best("ModelCheckpoint", best, mode)
        self._due = self._is_best = False
        self._best_step: int | None = None
        self._best_kept: tuple[float | None, int | None] = (None, None)  # the value and step of what `best` names
        self._saved: int | None = None

    @property
    def last(self) -> Path | None:
        """The newest checkpoint; None before the first."""
        return None if self._saved is None else orbax_files().folder(self.directory, self._saved)

    def on_train_begin(self, run: Run) -> None:
        if self._best is not None:
            self._best.check(run)
        run.claim(self.directory)
        self._saved = self._found(run)
        if self._saved is not None and self._best_step == self._saved and orbax_files().pointed(self.directory) != self._saved:
            self._point(self._saved)  # an earlier run was killed between the two

    def on_epoch_end(self, run: Run) -> None:
        self._due |= self._every_epochs is not None and (run.epoch + 1) % self._every_epochs == 0
        if self._best is not None and self._best.metric == TRAINING_LOSS:
            self._is_best |= self._best.update(run)

    def on_eval_end(self, run: Run) -> None:
        if self._best is not None and self._best.metric != TRAINING_LOSS:
            self._is_best |= self._best.update(run)

    def on_checkpoint(self, run: Run) -> None:
        due = self._due or self._is_best or run.finished or (self.every_steps is not None and run.steps % self.every_steps == 0)
        if due and run.steps:
            self._save(run)
        self._due = self._is_best = False

    def state_dict(self) -> dict[str, Any]:
        return {} if self._best is None else {"metric": self._best.metric, "best": self._best.value, "step": self._best_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._best is not None and self._best.metric == state["metric"]:
            self._best_kept = self._best.value, self._best_step = state["best"], state["step"]

    def _save(self, run: Run) -> None:
        """Save, or warn that it is not possible now."""
        try:
            self._write(run)
        except CheckpointWriteError as error:
            if self._best is not None and self._is_best:  # what is better than the kept one is still to be saved
                self._best.value, self._best_step = self._best_kept
            warnings.warn(self._problem(run, error), RuntimeWarning, stacklevel=2)

    def _problem(self, run: Run, error: CheckpointWriteError) -> str:
        there = orbax_files().saved_steps(self.directory)
        newest = f"the newest checkpoint there is {orbax_files().folder('', there[-1])}" if there else "there is no checkpoint yet"
        then = (
            "The training has ended: save the params of the result elsewhere, or make room and train on from the newest checkpoint"
            if run.finished
            else "The training goes on, and the next save tries again: make room there, or keep fewer checkpoints"
        )
        return f"ModelCheckpoint: what was trained in {run.steps} steps is not saved: {error} {then}; {newest}."

    def _write(self, run: Run) -> None:
        self._best_step = run.steps if self._is_best else self._best_step
        if self._saved != run.steps:
            run.save(self.directory)
            self._saved = run.steps
        if self._best is not None and self._is_best:
            self._point(run.steps)
            self._best_kept = self._best.value, run.steps
        self._forget()

    def _point(self, step: int) -> None:
        """Let the link `best` name a checkpoint."""
        by_first(lambda: orbax_files().point(self.directory, step), not_written(self.directory))

    def _forget(self) -> None:
        """Delete the checkpoints that are neither among the `keep` newest nor the best."""
        if not is_first():
            return
        steps = orbax_files().saved_steps(self.directory)
        for step in steps[: -self._keep] if self._keep else []:
            if step != self._best_step:
                orbax_files().delete(orbax_files().folder(self.directory, step))

    def _found(self, run: Run) -> int | None:
        """The step that the training resumes from, if its checkpoint is in this directory. Newer ones, which are damaged, are deleted.

        Raises:
          CheckpointError: there are good checkpoints that this training does not go on from.
        """
        steps = orbax_files().saved_steps(self.directory)
        here = run.resumed_from is not None and run.resumed_from.parent == self.directory.resolve()
        newer = [step for step in steps if not here or step > (run.resumed_at or 0)]
        for step in newer:
            path = orbax_files().folder(self.directory, step)
            if not here or orbax_files().is_good(path):
                raise CheckpointError(
                    f"ModelCheckpoint: {self.directory} holds {path.name} of another training. Go on from it with "
                    f"tpuflow.train(..., resume={str(self.directory)!r}), or choose an empty directory."
                )
            if is_first():
                orbax_files().delete(path)
        return run.resumed_at if here else None
