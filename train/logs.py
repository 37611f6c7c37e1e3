"""The log lines of the documented examples, as callbacks."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

import numpy as np

import tpuflow

STARTING = "============== Starting Training =============="


class _Lines(tpuflow.Callback):
    """Prints to a stream."""

    def __init__(self, out: TextIO | None = None):
        self._out = out

    def _print(self, text: str) -> None:
        print(text, file=self._out or sys.stdout, flush=True)


class LogLines(_Lines):
    """Print what the documented PyTorch loop for MNIST prints: a loss every hundred batches, accuracy and average loss after each epoch."""

    def __init__(self, samples: int, batch_size: int, *, every: int = 100, out: TextIO | None = None):
        super().__init__(out)
        self._samples = samples
        self._batch_size = batch_size
        self._every = every

    def on_epoch_begin(self, run: tpuflow.Run) -> None:
        """`Epoch 1` and its rule."""
        self._print(f"Epoch {run.epoch + 1}\n-------------------------------")

    def on_step_end(self, run: tpuflow.Run) -> None:
        """`loss: 2.304688  [   64/60000]` for the batches 0, 100, 200, ..."""
        if (run.step_in_epoch - 1) % self._every == 0:
            seen = min(run.step_in_epoch * self._batch_size, self._samples)
            self._print(f"loss: {float(run.loss):>7f}  [{seen:>5d}/{self._samples:>5d}]")

    def on_epoch_end(self, run: tpuflow.Run) -> None:
        """`Accuracy: 49.5%, Avg loss: 2.162669`, if there was an evaluation."""
        if "accuracy" in run.metrics:
            self._print(f"Test Error:\nAccuracy: {run.metrics['accuracy']:>0.1f}%, Avg loss: {run.metrics['avg_loss']:>8f}\n")


class SinkLines(_Lines):
    """Print what MindSpore's training guide prints for LeNet-5: the last loss of every sink."""

    def on_train_begin(self, run: tpuflow.Run) -> None:
        """The rule above everything."""
        self._print(STARTING)

    def on_sink_end(self, run: tpuflow.Run) -> None:
        """`epoch: 1 step: 1000, loss is 0.5399815`, in as many digits as tell an fp32 number from its neighbours."""
        self._print(f"epoch: {run.epoch + 1} step: {run.step_in_epoch}, loss is {np.float32(run.loss)!s}")


class GuideLines(_Lines):
    """Print what MindSpore's mixed-precision guide prints for ResNet-50: loss and time of every sink, time of an epoch and of its steps."""

    def __init__(self, out: TextIO | None = None):
        super().__init__(out)
        self._began, self._steps = 0.0, 0

    def on_train_begin(self, run: tpuflow.Run) -> None:
        """The rule above everything."""
        self._print(STARTING)

    def on_epoch_begin(self, run: tpuflow.Run) -> None:
        """Time is counted anew."""
        self._began, self._steps = time.perf_counter(), run.steps

    def on_sink_end(self, run: tpuflow.Run) -> None:
        """`epoch: 1 step 1562, loss is 1.2800476551055908`, and the milliseconds of the host's round trip."""
        self._print(f"epoch: {run.epoch + 1} step {run.step_in_epoch}, loss is {float(run.loss)}\n{1e3 * run.sink_seconds} ms")

    def on_epoch_end(self, run: tpuflow.Run) -> None:
        """`Epoch time: 65047.685, per step time: 41.644`: milliseconds of the host, evaluation included."""
        milliseconds = 1e3 * (time.perf_counter() - self._began)
        self._print(f"Epoch time: {milliseconds:.3f}, per step time: {milliseconds / max(1, run.steps - self._steps):.3f}")


class TutorialLines(_Lines):
    """Print what PyTorch's CIFAR-10 tutorial prints: the mean loss of every 2000 batches."""

    def __init__(self, every: int = 2000, out: TextIO | None = None):
        super().__init__(out)
        self._every, self._sum = every, 0.0

    def on_epoch_begin(self, run: tpuflow.Run) -> None:
        """A sum that is not full is dropped, as in the tutorial; one of an epoch that is resumed goes on."""
        if run.step_in_epoch == 0:
            self._sum = 0.0

    def on_step_end(self, run: tpuflow.Run) -> None:
        """`[1,  2000] loss: 2.208`."""
        self._sum += float(run.loss)
        if run.step_in_epoch % self._every == 0:
            self._print(f"[{run.epoch + 1}, {run.step_in_epoch:5d}] loss: {self._sum / self._every:.3f}")
            self._sum = 0.0

    def on_train_end(self, run: tpuflow.Run) -> None:
        """Said also when the training was cut short."""
        self._print("Finished Training")

    def state_dict(self) -> dict[str, Any]:
        """The sum so far."""
        return {"sum": self._sum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The sum of the steps before the resumption."""
        self._sum = float(state["sum"])


def tutorial_accuracies(per_class: Mapping[str, tuple[int, int]]) -> str:
    """What the tutorial prints at its end; `per_class`: class -> (hits, images)."""
    hits, total = (sum(column) for column in zip(*per_class.values(), strict=True))
    lines = [f"Accuracy of the network on the {total} test images: {100 * hits // total} %"]
    for name, (hit, images) in per_class.items():
        lines.append(f"Accuracy for class: {name:5s} is {100 * hit / images:.1f} %" if images else f"No test image of class: {name}")
    return "\n".join(lines)
