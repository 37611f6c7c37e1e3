"""What a YOLOv5 training writes into its folder: options, hyperparameters, weights, a line of figures for each epoch."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import tpuflow
from models.yolov5_config import Config
from tpuflow.errors import ConfigError
from train.detection.results import append_results
from train.detection.schedules import Plan
from train.detection.transfer import save_network

WEIGHTS, CHECKPOINTS, RESULTS = "weights", "checkpoints", "results.csv"
OPTIONS, HYPERPARAMETERS = "opt.yaml", "hyp.yaml"
LOSSES = ("box", "obj", "cls")
FIGURES = ("precision", "recall", "mAP50", "mAP50-95")
KIND = ".safetensors"


def write_settings(folder: Path, options: Any, hyp: Any) -> None:
    """Write opt.yaml and hyp.yaml.

    Raises:
      ConfigError: one cannot be written.
    """
    for name, values in ((OPTIONS, options), (HYPERPARAMETERS, hyp)):
        plain = {one.name: _plain(getattr(values, one.name)) for one in dataclasses.fields(values)}
        try:
            (folder / name).write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{folder / name}: cannot be written ({error.strerror}).") from error


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


class EpochLines(tpuflow.Callback):
    """Print a line for each epoch and keep results.csv, written anew from the history each time, so that a resumption doubles nothing."""

    def __init__(self, folder: Path, plan: Plan):
        self._path, self._plan = folder / RESULTS, plan

    def on_epoch_end(self, run: tpuflow.Run) -> None:
        """`3/100  box 0.07312  obj 0.0411  cls 0.0204  P 0.61  R 0.52  mAP50 0.55  mAP50-95 0.27`."""
        self._path.unlink(missing_ok=True)
        steps, values = 0, [math.nan]
        for epoch in run.history:
            steps += epoch["steps"]
            values = self._values(epoch, steps)
            append_results(self._path, epoch["epoch"] - 1, values)
        losses = "  ".join(f"{name} {value:.4g}" for name, value in zip(LOSSES, values[:3], strict=True))
        shown = zip(("P", "R", "mAP50", "mAP50-95"), values[3:7], strict=True)
        figures = "".join(f"  {name} {value:.3g}" for name, value in shown) if "mAP50" in run.metrics else ""
        print(f"{run.epoch + 1}/{run.epochs}  {losses}{figures}", flush=True)

    def _values(self, epoch: Any, steps: int) -> list[float]:
        """An epoch's figures, after so many steps of all, in the order of the columns; without an evaluation its part is not a number."""
        trained = [float(np.mean(epoch["metrics"].get(name) or [np.nan])) for name in LOSSES]
        plan, last = self._plan, np.array([max(steps - 1, 0)])
        rate = float(plan.rates_at(last)[0])
        of_biases = float(plan.rates_at(last, plan.hyp.warmup_bias_lr)[0])
        figures = [float(epoch.get(name, np.nan)) for name in FIGURES]
        validated = [float(epoch.get(name, np.nan)) for name in LOSSES]
        return [*trained, *figures, *validated, of_biases, rate, rate]


class WeightFiles(tpuflow.Callback):
    """After each checkpoint, the averaged weights in weights/last, and in weights/best if it is the best; every `period` epochs in a file
    of the epoch's own. A resumed training writes first what an earlier one, killed behind its checkpoint, had no time to write."""

    def __init__(self, folder: Path, saver: tpuflow.ModelCheckpoint, config: Config, like: Any, period: int):
        self._folder, self._saver, self._config, self._like, self._period = folder / WEIGHTS, saver, config, like, period
        self._written: Path | None = None

    def on_train_begin(self, run: tpuflow.Run) -> None:
        """Write what is of the checkpoint that the training goes on from."""
        self._write(run)

    def on_checkpoint(self, run: tpuflow.Run) -> None:
        """Write what is new."""
        self._write(run)

    def _write(self, run: tpuflow.Run) -> None:
        newest = self._saver.last
        if newest is None or newest == self._written:
            return
        self._folder.mkdir(exist_ok=True)
        epoch, best = len(run.history) - 1, self._saver.directory / "best"
        wanted = {
            "last": True,
            "best": best.exists() and best.resolve() == newest.resolve(),
            f"epoch{epoch}": self._period > 0 and epoch % self._period == 0 and not run.finished,
        }
        weights = tpuflow.load_params(newest, self._like, average=True)
        for name in (name for name, due in wanted.items() if due):
            save_network(self._folder / f"{name}{KIND}", self._config, weights)
        self._written = newest
