"""How long a training is, and what is printed on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import tpuflow
from train.trainer.optimizers import rates
from train.trainer.options import TrainerOptions


@dataclass(frozen=True, slots=True)
class Length:
    """How long a training is: steps in a pass over the data, updates and steps in all."""

    steps_per_epoch: int
    updates: int
    accumulate: int

    @property
    def steps(self) -> int:
        """Steps in all."""
        return self.updates * self.accumulate


def length(options: TrainerOptions, samples: int) -> Length:
    """The length that the options ask for, with so many samples."""
    steps, accumulate = math.ceil(samples / options.per_device_train_batch_size), options.gradient_accumulation_steps
    updates = options.max_steps if options.max_steps > 0 else math.ceil(options.num_train_epochs * steps / accumulate)
    return Length(steps, updates, accumulate)


class TrainerLines(tpuflow.Callback):
    """Log after every so many updates, as transformers' Trainer prints it; keeps what it printed for `trainer_state.json`."""

    def __init__(self, options: TrainerOptions, length: Length):
        self._rates, self._length = rates(options, length.updates), length
        self.every_steps = options.logging_steps * length.accumulate
        self._losses: list[float] = []
        self.log: list[dict[str, Any]] = []

    def on_step_end(self, run: tpuflow.Run) -> None:
        """`{'loss': 3.2931, 'learning_rate': 4.9e-05, 'epoch': 0.5}`: the mean loss since the last line, the rate of the next update."""
        self._losses.append(float(run.loss))
        last = run.steps == self._length.steps
        if run.steps % (self.every_steps or 1) == 0 or last:
            rate = float(self._rates[run.steps // self._length.accumulate])
            self._say(run, loss=round(float(np.mean(self._losses)), 4), learning_rate=rate)
            self._losses.clear()

    def on_eval_end(self, run: tpuflow.Run) -> None:
        """The same for an evaluation's figures."""
        self._say(run, **{f"eval_{name.removeprefix('avg_')}": value for name, value in run.metrics.items()})

    def state_dict(self) -> dict[str, Any]:
        """The log so far and the losses of the next line."""
        return {"losses": self._losses, "log": self.log}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the next line."""
        self._losses, self.log = list(state["losses"]), list(state["log"])

    def _say(self, run: tpuflow.Run, **figures: Any) -> None:
        line = figures | {"epoch": round(run.steps / self._length.steps_per_epoch, 2)}
        print(line, flush=True)
        self.log.append({**line, "step": run.steps // self._length.accumulate})
