"""Callbacks: what a user may do while a training runs, and the two that come with tpuflow."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO


@dataclass(slots=True)
class Run:
    """What callbacks see of a running training.

    Step numbers count from 0 over the whole training, epochs from 0. `loss`, `loss_scale` and `skipped` are those of the step that
    `on_step_end` reports; `losses` those of the last sink. `metrics` is filled before `on_epoch_end` if there is evaluation data: a
    number for each metric, or a list of them; if none were asked for "avg_loss" and, for class labels, "accuracy" in percent.
    Setting `stop` ends the training after the current sink.
    """

    epochs: int
    steps_per_epoch: int | None
    batch_size: int
    policy: str
    epoch: int = 0
    step: int = -1
    loss: float = float("nan")
    loss_scale: float = 1.0
    skipped: bool = False
    losses: list[float] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    round_trips: int = 0
    stop: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)


class Callback:
    """Base of callbacks: override what you need. Step callbacks are called at the end of their sink, in order, one for every step."""

    def on_train_begin(self, run: Run) -> None:
        """Before the first step."""

    def on_train_end(self, run: Run) -> None:
        """After the last step, also when the training was interrupted."""

    def on_epoch_begin(self, run: Run) -> None:
        """Before an epoch (of `sink_size` batches if that is positive)."""

    def on_epoch_end(self, run: Run) -> None:
        """After an epoch and its evaluation."""

    def on_step_end(self, run: Run) -> None:
        """Once for every step."""

    def on_sink_end(self, run: Run) -> None:
        """After every host round trip."""


def notify(callbacks: Sequence[Callback], event: str, run: Run) -> None:
    """Call the method `event` of every callback, in order."""
    for callback in callbacks:
        getattr(callback, event)(run)


class LossMonitor(Callback):
    """Print the loss of every `every`-th step."""

    def __init__(self, every: int = 100, out: TextIO | None = None):
        self._every, self._out = max(1, every), out

    def on_step_end(self, run: Run) -> None:
        if run.step % self._every == 0:
            print(f"epoch: {run.epoch + 1} step: {run.step + 1}, loss is {run.loss:.6f}", file=self._out or sys.stdout, flush=True)


class TimeMonitor(Callback):
    """Print the host's time of every epoch and of one step in it; evaluation included."""

    def __init__(self, out: TextIO | None = None):
        self._out = out
        self._started, self._first_step = 0.0, 0

    def on_epoch_begin(self, run: Run) -> None:
        self._started, self._first_step = time.perf_counter(), run.step

    def on_epoch_end(self, run: Run) -> None:
        milliseconds = 1e3 * (time.perf_counter() - self._started)
        steps = max(1, run.step - self._first_step)
        text = f"epoch time: {milliseconds:.3f} ms, per step time: {milliseconds / steps:.3f} ms (host)"
        print(text, file=self._out or sys.stdout, flush=True)
