"""Reports during a training: `tpuflow.train(..., numerics=True)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpuflow.numerics.collecting import report_of
from tpuflow.numerics.instrumenting import Instrumented, instrument
from tpuflow.numerics.report import NumericsReport
from tpuflow.training.callbacks.base import Callback, Run
from tpuflow.training.preparing import Job
from tpuflow.training.train_step import Recipe


class Probe(Callback):
    """Measures a step now and then, beside the training: from the state as it stands, on the first batch of the data.

    It is the same batch each time, so that what differs between reports is the model. The step's results are thrown away: no value of
    the training changes. With `numerics` a number n, before the first and after every n-th step; if it is true, before every epoch
    and after the last.
    """

    def __init__(self, job: Job, state: Callable[[], Any]):
        self.every_steps = None if job.config.numerics is True else job.config.numerics
        self.reports: list[NumericsReport] = []
        self._job, self._state = job, state
        self._step: Instrumented | None = None
        self._looked: int | None = None

    def on_epoch_begin(self, run: Run) -> None:
        if self.every_steps is None or self._looked is None:
            self._look(run.steps)

    def on_sink_end(self, run: Run) -> None:
        if self.every_steps is not None and run.steps % self.every_steps == 0:
            self._look(run.steps)

    def on_epoch_end(self, run: Run) -> None:
        if self.every_steps is None and (run.epoch + 1 == run.epochs or run.stop):
            self._look(run.steps)

    def _look(self, steps: int) -> None:
        """Report on what the next step would do on the first batch; not twice for the same state."""
        if steps == self._looked:
            return
        job, state = self._job, self._state()
        batch = job.first
        if self._step is None:
            assert isinstance(job.recipe, Recipe)
            self._step = instrument(job.recipe, state, batch, job.target)
        _, measured = self._step(state, batch)
        self.reports.append(report_of({**job.settings, "step": steps}, self._step, [measured]))
        self._looked = steps
