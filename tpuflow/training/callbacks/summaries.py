"""`SummaryWriter`: what a training reports as TensorBoard event files, written by tensorboardX."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from tpuflow.checking import check_number, check_path, check_real
from tpuflow.errors import ConfigError
from tpuflow.training.callbacks.base import Callback, Run


class SummaryWriter(Callback):
    """Write the training's figures where `tensorboard --logdir directory` finds them; needs `pip install 'tpuflow[tensorboard]'`.

    Of every `every`-th step: "train/loss", "train/loss_scale", "train/skipped" (0 or 1), and "train/learning_rate" if it is known: given
    here as a number or an Optax schedule, or in the optimizer's state (`optax.inject_hyperparams`). Of every round trip: "time/step_ms",
    on the host. Of every evaluation: "eval/" and the name of the metric. What is drawn over the horizontal axis is the number of steps
    done. A resumed training writes into the same directory: what was written after its checkpoint is discarded.

    Raises:
      ConfigError: tensorboardX is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str], *, every: int = 1, learning_rate: float | Callable[[int], Any] | None = None):
        check_path("SummaryWriter: directory", directory)
        check_number("SummaryWriter: every", every, 1)
        if learning_rate is not None and not callable(learning_rate):
            check_real("SummaryWriter: learning_rate", learning_rate, "a number, or an Optax schedule")
        self._directory, self._every, self._learning_rate = os.fspath(directory), every, learning_rate
        self._library = _tensorboardx()
        self._writer: Any = None

    def on_train_begin(self, run: Run) -> None:
        self._writer = self._library.SummaryWriter(self._directory, purge_step=None if run.resumed_at is None else run.resumed_at + 1)

    def on_step_end(self, run: Run) -> None:
        if run.step % self._every:
            return
        self._add(run, {"train/loss": run.loss, "train/loss_scale": run.loss_scale, "train/skipped": float(run.skipped)})
        if self._learning_rate is not None:
            rate = self._learning_rate(run.step) if callable(self._learning_rate) else self._learning_rate
            self._add(run, {"train/learning_rate": float(rate)})

    def on_sink_end(self, run: Run) -> None:
        rate = run.learning_rate() if self._learning_rate is None else None
        self._add(run, {} if rate is None else {"train/learning_rate": rate})
        self._add(run, {"time/step_ms": 1e3 * run.sink_seconds / max(1, len(run.losses))})

    def on_eval_end(self, run: Run) -> None:
        self._add(run, {f"eval/{name}": value for name, value in run.metrics.items() if isinstance(value, (int, float))})

    def on_train_end(self, run: Run) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, run: Run, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, run.steps)


def _tensorboardx() -> Any:
    try:
        return importlib.import_module("tensorboardX")
    except ImportError as error:
        raise ConfigError("SummaryWriter needs the package tensorboardX; pip install 'tpuflow[tensorboard]'.") from error
