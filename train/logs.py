"""The log lines of the documented example, as a callback: a loss every hundred batches, accuracy and average loss after each epoch."""

from __future__ import annotations

import sys
from typing import Any, TextIO

import tpuflow


class LogLines(tpuflow.Callback):
    """Print what the documented PyTorch loop prints, line by line.

    Counts epochs and batches itself, so the lines do not depend on the sink: with a sink of a whole epoch they come all at once.
    """

    def __init__(self, samples: int, batch_size: int, *, every: int = 100, out: TextIO | None = None):
        self._samples = samples
        self._batch_size = batch_size
        self._every = every
        self._out = out
        self._epoch = 0
        self._batch = 0

    def on_epoch_begin(self, run: Any) -> None:
        """`Epoch 1` and its rule."""
        self._epoch += 1
        self._batch = 0
        self._print(f"Epoch {self._epoch}\n-------------------------------")

    def on_step_end(self, run: Any) -> None:
        """`loss: 2.304688  [   64/60000]` for the batches 0, 100, 200, ..."""
        if self._batch % self._every == 0:
            seen = min((self._batch + 1) * self._batch_size, self._samples)
            self._print(f"loss: {float(run.loss):>7f}  [{seen:>5d}/{self._samples:>5d}]")
        self._batch += 1

    def on_epoch_end(self, run: Any) -> None:
        """`Accuracy: 49.5%, Avg loss: 2.162669`, if there was an evaluation."""
        if "accuracy" in run.metrics:
            self._print(f"Test Error:\nAccuracy: {run.metrics['accuracy']:>0.1f}%, Avg loss: {run.metrics['avg_loss']:>8f}\n")

    def _print(self, text: str) -> None:
        print(text, file=self._out or sys.stdout, flush=True)
