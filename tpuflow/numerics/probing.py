"""Reports during a training: `tpuflow.train(..., numerics=True)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpuflow.numerics.collecting import report_of
from tpuflow.numerics.instrumenting import InstrumentedStep, instrument
from tpuflow.numerics.report import NumericsReport
from tpuflow.training.callbacks.base import Callback, Run
from tpuflow.training.preparing import Job
from tpuflow.training.train_step import Recipe


class Probe(Callback):
    """A callback that measures a step beside the training: from the current state, on the first batch of the data.

    The batch is the same each time, so that reports differ by the model alone. The step's results are discarded, so that the training is
    not affected. With `numerics` a number n, it measures before the first and after every n-th step; if it is true, before every epoch and
    after the last.
    """

    def __init__(self, job: Job, state: Callable[[], Any]):
        self.every_steps = None if job.config.numerics is True else job.config.numerics
        self.reports: list[NumericsReport] = []
        self._job, self._state = job, state
        self._step: InstrumentedStep | None = None
        self._measured_at: int | None = None

    def on_epoch_begin(self, run: Run) -> None:
        if self.every_steps is None or self._measured_at is None:
            self._measure(run.steps)

    def on_sink_end(self, run: Run) -> None:
        if self.every_steps is not None and run.steps % self.every_steps == 0:
            self._measure(run.steps)

    def on_epoch_end(self, run: Run) -> None:
        if self.every_steps is None and (run.epoch + 1 == run.epochs or run.stop):
            self._measure(run.steps)

    def _measure(self, steps: int) -> None:
        """Measure a step on the first batch and add a report, unless there is one for this state."""
        if steps == self._measured_at:
            return
        job, state = self._job, self._state()
        batch = job.first
        if self._step is None:
            assert isinstance(job.recipe, Recipe)
            self._step = instrument(job.recipe, state, batch, job.target)
        _, measured = self._step(state, batch)
        self.reports.append(report_of({**job.settings, "step": steps}, self._step, [measured]))
        self._measured_at = steps
