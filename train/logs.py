"""The log lines of the documented examples: rows of an event and a format, printed by one callback."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np

import tpuflow

STARTING = "============== Starting Training =============="


@dataclass(frozen=True, slots=True)
class Row:
    """A line for an event of `tpuflow.Callback`: its text holds the names of FACTS in braces.

    Steps are printed every so many, from the step `first` of an epoch on. What `needs` a metric is printed if an evaluation has found it.
    """

    event: str
    text: str
    every: int = 1
    first: int = 1
    needs: str | None = None


class Lines(tpuflow.Callback):
    """Prints the rows of a training on `samples` samples."""

    def __init__(self, rows: Sequence[Row], samples: int = 0, out: TextIO | None = None):
        self.samples, self.began, self.steps, self.sum, self.mean = samples, 0.0, 0, 0.0, 0.0
        self._rows, self._out = rows, out
        self._averages = next((row.every for row in rows if "{mean" in row.text), None)

    def on_train_begin(self, run: tpuflow.Run) -> None:
        """Before the first step."""
        self._print("train_begin", run)

    def on_epoch_begin(self, run: tpuflow.Run) -> None:
        """Time is counted anew. A sum of losses that is not full is dropped; one of an epoch that is resumed goes on."""
        self.began, self.steps = time.perf_counter(), run.steps
        self.sum = self.sum if run.step_in_epoch else 0.0
        self._print("epoch_begin", run)

    def on_step_end(self, run: tpuflow.Run) -> None:
        """Losses are summed where a row prints their mean."""
        if self._averages is not None:
            self.sum += float(run.loss)
            if run.step_in_epoch % self._averages == 0:
                self.mean, self.sum = self.sum / self._averages, 0.0
        self._print("step_end", run)

    def on_sink_end(self, run: tpuflow.Run) -> None:
        """After a host round trip."""
        self._print("sink_end", run)

    def on_epoch_end(self, run: tpuflow.Run) -> None:
        """After an epoch and its evaluation."""
        self._print("epoch_end", run)

    def on_train_end(self, run: tpuflow.Run) -> None:
        """Said also when the training was cut short."""
        self._print("train_end", run)

    def state_dict(self) -> dict[str, Any]:
        """The sum of losses so far, where one is kept."""
        return {} if self._averages is None else {"sum": self.sum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The sum of the steps before the resumption."""
        self.sum = float(state["sum"])

    def _print(self, event: str, run: tpuflow.Run) -> None:
        for row in self._rows:
            if row.event != event or (row.needs is not None and row.needs not in run.metrics):
                continue
            if event != "step_end" or (run.step_in_epoch - row.first) % row.every == 0:
                print(row.text.format_map(_Facts(self, run)), file=self._out or sys.stdout, flush=True)


FACTS: Mapping[str, Callable[[Lines, tpuflow.Run], Any]] = {
    "epoch": lambda log, run: run.epoch + 1,
    "step": lambda log, run: run.step_in_epoch,
    "loss": lambda log, run: float(run.loss),
    "fp32_loss": lambda log, run: np.float32(run.loss),
    "mean": lambda log, run: log.mean,
    "seen": lambda log, run: min(run.step_in_epoch * run.batch_size, log.samples),
    "samples": lambda log, run: log.samples,
    "accuracy": lambda log, run: run.metrics["accuracy"],
    "avg_loss": lambda log, run: run.metrics["avg_loss"],
    "sink_ms": lambda log, run: 1e3 * run.sink_seconds,
    "epoch_ms": lambda log, run: 1e3 * (time.perf_counter() - log.began),
    "step_ms": lambda log, run: 1e3 * (time.perf_counter() - log.began) / max(1, run.steps - log.steps),
}
"""What a text may name. fp32_loss is written in as many digits as tell an fp32 number from its neighbours; times are the host's in
milliseconds, epochs with their evaluation; mean is of the losses since the row was last printed."""


class _Facts(dict[str, Any]):
    """Facts found when a text names them."""

    def __init__(self, log: Lines, run: tpuflow.Run):
        self._of = log, run

    def __missing__(self, name: str) -> Any:
        self[name] = FACTS[name](*self._of)
        return self[name]


MNIST = (
    Row("epoch_begin", "Epoch {epoch}\n-------------------------------"),
    Row("step_end", "loss: {loss:>7f}  [{seen:>5d}/{samples:>5d}]", every=100),
    Row("epoch_end", "Test Error:\nAccuracy: {accuracy:>0.1f}%, Avg loss: {avg_loss:>8f}\n", needs="accuracy"),
)
"""The documented PyTorch loop for MNIST."""

LENET = (Row("train_begin", STARTING), Row("sink_end", "epoch: {epoch} step: {step}, loss is {fp32_loss!s}"))
"""MindSpore's training guide for LeNet-5."""

RESNET = (
    Row("train_begin", STARTING),
    Row("sink_end", "epoch: {epoch} step {step}, loss is {loss}\n{sink_ms} ms"),
    Row("epoch_end", "Epoch time: {epoch_ms:.3f}, per step time: {step_ms:.3f}"),
)
"""MindSpore's mixed-precision guide for ResNet-50."""

TUTORIAL = (
    Row("step_end", "[{epoch}, {step:5d}] loss: {mean:.3f}", every=2000, first=2000),
    Row("train_end", "Finished Training"),
)
"""PyTorch's CIFAR-10 tutorial."""


def tutorial_accuracies(per_class: Mapping[str, tuple[int, int]]) -> str:
    """What the tutorial prints at its end; `per_class`: class -> (hits, images)."""
    hits, total = (sum(column) for column in zip(*per_class.values(), strict=True))
    lines = [f"Accuracy of the network on the {total} test images: {100 * hits // total} %"]
    for name, (hit, images) in per_class.items():
        lines.append(f"Accuracy for class: {name:5s} is {100 * hit / images:.1f} %" if images else f"No test image of class: {name}")
    return "\n".join(lines)
