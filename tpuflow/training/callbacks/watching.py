"""Callbacks that watch a metric: the best value so far, and stopping early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpuflow.checking import check_choice, check_number, check_real, check_text
from tpuflow.errors import ConfigError
from tpuflow.training.callbacks.base import Callback, Run

MODES = ("min", "max")
TRAINING_LOSS = "loss"
"""The mean of an epoch's training losses: watched at the end of the epoch, where other metrics are after an evaluation."""


@dataclass(slots=True)
class Best:
    """The best value of a metric so far; `mode` says whether less ("min") or more ("max") is better, None: less if it is a loss or error.

    A value is better if it beats the best one by more than `min_delta`; one that is not a finite number never is.
    """

    who: str
    metric: str
    mode: str | None = None
    min_delta: float = 0.0
    value: float | None = None

    def __post_init__(self) -> None:
        check_text(f"{self.who}: metric", self.metric)
        if self.mode is not None:
            check_choice(f"mode of {self.who}", self.mode, MODES)
        check_real(f"{self.who}: min_delta", self.min_delta, "a finite number of 0 or more", 0.0)
        if self.mode is None:
            self.mode = "min" if "loss" in self.metric or "err" in self.metric else "max"

    def check(self, run: Run) -> None:
        """Check that the training will have the metric.

        Raises:
          ConfigError: the metric needs evaluations, and there are none.
        """
        if self.metric != TRAINING_LOSS and not run.evaluates:
            raise ConfigError(f"{self.who}: the metric {self.metric!r} comes from evaluations: give eval_data, or watch {TRAINING_LOSS!r}.")

    def update(self, run: Run) -> bool:
        """Take the metric's current value into account. Returns whether it is the best so far.

        Raises:
          ConfigError: there is no such metric, or it is not one number.
        """
        value = self._found(run)
        if not math.isfinite(value):
            return False
        better = self.value is None or (self.value - value if self.mode == "min" else value - self.value) > self.min_delta
        self.value = value if better else self.value
        return better

    def _found(self, run: Run) -> float:
        if self.metric == TRAINING_LOSS:
            losses = run.history[-1]["losses"]
            return sum(losses) / len(losses) if losses else math.nan
        if not isinstance(run.metrics.get(self.metric), (int, float)):
            numbers = [name for name, value in run.metrics.items() if isinstance(value, (int, float))]
            raise ConfigError(f"{self.who}: no metric is called {self.metric!r}; there are: {', '.join([*numbers, TRAINING_LOSS])}.")
        return float(run.metrics[self.metric])


class EarlyStopping(Callback):
    """End the training when a metric has not become better for `patience` evaluations (epochs, for the training "loss").

    metric: a metric of the evaluation, such as "accuracy" or "avg_loss", or "loss". mode: "min" or "max"; None: "min" for names with
    "loss" or "err" in them. min_delta: by how much a value must beat the best one to count as better. Its count is saved in checkpoints.
    """

    def __init__(self, metric: str = "avg_loss", *, patience: int = 3, min_delta: float = 0.0, mode: str | None = None):
        check_number("EarlyStopping: patience", patience, 1)
        self.best = Best("EarlyStopping", metric, mode, min_delta)
        self._patience, self._waited = patience, 0

    def on_train_begin(self, run: Run) -> None:
        self.best.check(run)
        run.stop = run.stop or self._waited >= self._patience

    def on_eval_end(self, run: Run) -> None:
        if self.best.metric != TRAINING_LOSS:
            self._update(run)

    def on_epoch_end(self, run: Run) -> None:
        if self.best.metric == TRAINING_LOSS:
            self._update(run)

    def _update(self, run: Run) -> None:
        self._waited = 0 if self.best.update(run) else self._waited + 1
        run.stop = run.stop or self._waited >= self._patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best.value, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best.value, self._waited = state["best"], state["waited"]
