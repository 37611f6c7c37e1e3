"""Rates and momenta of a YOLOv5 training, update by update, and how many steps make an update."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tpuflow import Accumulation
from train.detection.hyperparameters import Hyperparameters

NOMINAL_BATCH = 64
"""Images that an update shall take, whatever the batch."""
LEAST_WARMUP_STEPS = 100


@dataclass(frozen=True, slots=True)
class Plan:
    """How long a training is and how its rates go: as the release's loop sets them, from which the numbers of this file are.

    cosine: the rate falls along a cosine instead of a line.
    """

    hyp: Hyperparameters
    epochs: int
    steps_per_epoch: int
    batch_size: int
    cosine: bool = False

    @property
    def warmup_steps(self) -> int:
        """The number of the last step of the warm-up, from 0."""
        return max(round(self.hyp.warmup_epochs * self.steps_per_epoch), LEAST_WARMUP_STEPS)

    @property
    def accumulation(self) -> Accumulation:
        """Steps for an update: their number rises in the warm-up, and their gradients are added up."""
        return Accumulation(max(NOMINAL_BATCH / self.batch_size, 1), self.warmup_steps, total=True)

    @property
    def weight_decay(self) -> float:
        """That of the hyperparameters, scaled to the images that an update really takes."""
        taken = self.batch_size * max(round(NOMINAL_BATCH / self.batch_size), 1)
        return self.hyp.weight_decay * taken / NOMINAL_BATCH

    @property
    def updates(self) -> np.ndarray:
        """The numbers of the steps that update the parameters, int64 [updates]; of the first step if there is none."""
        found = self.accumulation.updates(self.epochs * self.steps_per_epoch)
        return found if len(found) else np.zeros(1, np.int64)

    def rates(self, first: float = 0.0) -> np.ndarray:
        """The rate of every update, float64; `first` is that of the first step."""
        return self.rates_at(self.updates, first)

    def rates_at(self, steps: np.ndarray, first: float = 0.0) -> np.ndarray:
        """The rate at the steps of these numbers, float64."""
        last, epochs = self.warmup_steps, steps // self.steps_per_epoch
        goal = self.hyp.lr0 * self.share(epochs)
        rising = first + (goal - first) * np.interp(steps, [0, last], [0.0, 1.0])
        # The scheduler's first step leaves the rate where it is: after the warm-up the rate is that of the epoch before, except in the
        # epoch in which the warm-up ended.
        after = self.hyp.lr0 * self.share(np.where(epochs == last // self.steps_per_epoch, epochs, epochs - 1))
        return np.where(steps <= last, rising, after)

    def momenta(self) -> np.ndarray:
        """The momentum of every update, float64."""
        return np.interp(self.updates, [0, self.warmup_steps], [self.hyp.warmup_momentum, self.hyp.momentum])

    def share(self, epoch: np.ndarray) -> np.ndarray:
        """Of the rate, in an epoch: from 1 to lrf."""
        if self.cosine:
            return (1 - np.cos(epoch * math.pi / self.epochs)) / 2 * (self.hyp.lrf - 1) + 1
        return (1 - epoch / self.epochs) * (1.0 - self.hyp.lrf) + self.hyp.lrf
