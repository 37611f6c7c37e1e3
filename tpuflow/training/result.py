"""`TrainResult`, which `tpuflow.train` returns: parameters, history and counts, also as text and JSON."""

from __future__ import annotations

import html
import importlib.util
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpuflow.checking import check_path
from tpuflow.device.timing import Calibration
from tpuflow.device.timing.program import sink_time
from tpuflow.device.timing.result import seconds_text
from tpuflow.errors import ConfigError
from tpuflow.jaxprs.processes import by_first
from tpuflow.reports.files import PlainData
from tpuflow.reports.page import Numbers, write_page
from tpuflow.reports.profile import Profile
from tpuflow.reports.profile import profile as make_profile
from tpuflow.reports.reported import Reported
from tpuflow.stages.flattening import nested
from tpuflow.training.checkpoints import orbax_files
from tpuflow.training.checkpoints.locking import not_written
from tpuflow.training.descriptions import describe_optimizer
from tpuflow.training.plotting import history_svg, plot_history


@dataclass(frozen=True, slots=True, repr=False)
class TrainResult(Reported, PlainData):
    """The outcome of `tpuflow.train`.

    `params` is the trained tree, `carried` other variables (batch statistics, ...), `opt_state` the optimizer's state; as JAX arrays.
    `history` has one dict an epoch: "epoch" (from 1), "losses", "loss_scale" and "skipped" (one entry a step; skipped as booleans),
    "steps" (steps run), with evaluation data every metric by its name: "accuracy" (percent; for class labels) and "avg_loss" (mean of
    the batches' losses) if no others were asked for,
    "evaluations" (one dict for each: "step", the number of steps before it, and its metrics), and "complete" (False for the epoch that
    Ctrl-C or a callback cut short). `resumed_at` is the number of steps that a checkpoint brought; None without one.
    `numerics` holds the `tpuflow.NumericsReport`s that were asked for, in the order of their steps.
    `chosen` says in words what was not given and therefore chosen. `ema` is the average of the parameters, if one was kept. With a loss of
    one's own an epoch's "metrics" has its scalars by name, one entry a step.

    Printing it prints the report; a notebook shows the curves too.
    """

    params: Any
    carried: Any
    opt_state: Any
    history: list[dict[str, Any]]
    settings: Mapping[str, Any]
    chosen: Mapping[str, str]
    round_trips: int
    eval_round_trips: int
    launches: int
    hbm_bytes: int
    seconds: Mapping[str, float]
    interrupted: bool = False
    resumed_at: int | None = None
    executables: tuple[Any, ...] = field(default=(), repr=False)
    numerics: tuple[Any, ...] = field(default=(), repr=False)
    ema: Any = None
    trained: Any = None

    def __repr__(self) -> str:
        return self.report()

    def _repr_html_(self) -> str:
        """The report and, where matplotlib is installed, the curves."""
        text = f"<pre>{html.escape(self.report())}</pre>"
        if importlib.util.find_spec("matplotlib") is None:
            return text
        return text + history_svg(self.history, f"{self.settings['model']}, {self.settings['policy']}")

    def predict(self, data: Any, *, progress: bool = True) -> Any:
        """What the trained model gives for all samples, as `tpuflow.predict`: NumPy arrays [N, ...], floats in fp32.

        Raises:
          ConfigError: the training had a step of its own.
          DataError: the model cannot take the data.
        """
        return self.trained.predict(data, progress=progress)

    def evaluate(self, data: Any, metrics: Any = None, *, progress: bool = True) -> dict[str, Any]:
        """The metrics of the trained model on data, as `tpuflow.evaluate`; the training's own if none are given.

        Raises:
          ConfigError, DataError: as `tpuflow.train` does.
        """
        return self.trained.evaluate(data, metrics, progress=progress)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write parameters (those that `predict` uses) and carried variables into a new directory that `tpuflow.load_params` and `params=`
        read; it appears whole or not at all.

        Raises:
          CheckpointError: the directory is there, or cannot be written.
        """
        params, carried = self.trained.eval_variables
        arrays = nested({"params": params, **(carried if isinstance(carried, dict) else {})})
        by_first(lambda: orbax_files().save_variables(path, arrays), not_written(path))

    @property
    def variables(self) -> Any:
        """Parameters and carried variables as linen's `apply` takes them."""
        return {"params": self.params, **self.carried} if isinstance(self.carried, dict) else self.params

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [loss for epoch in self.history for loss in epoch["losses"]]

    @property
    def steps(self) -> int:
        """Training steps run."""
        return len(self.losses)

    @property
    def nan_steps(self) -> list[int]:
        """Numbers (from 0) of the steps whose loss was not a finite number."""
        return [i for i, loss in enumerate(self.losses) if not math.isfinite(loss)]

    @property
    def skipped_steps(self) -> list[int]:
        """Numbers (from 0) of the steps whose update was skipped because a gradient overflowed."""
        return [i for i, skipped in enumerate(s for epoch in self.history for s in epoch["skipped"]) if skipped]

    def report(self, calibration: Calibration | None = None) -> str:
        """The outcome as a few lines of text; device times stand on a calibration of one's own, or on what tpuflow has for the chip."""
        return "\n".join(_report_lines(self, calibration))

    def profile(self) -> Profile:
        """The modelled cost of one of its steps, by layer, kernel and queue, and the memory's timeline.

        Raises:
          ConfigError: no step ran.
        """
        if not self.executables or not self.steps:
            raise ConfigError("profile: the training ran no step on the device; there is nothing to report the cost of.")
        program, steps = self.executables[0].program, self._steps_a_trip
        optimizer = describe_optimizer(self.opt_state) if isinstance(self.opt_state, tuple) else ""  # a step of one's own has its own state
        settings = {
            "policy": self.settings["policy"],
            "batch": str(self.settings["batch_size"]),
            "optimizer": self.chosen.get("optimizer", optimizer),
        }
        return make_profile(program, sink_time(program, steps), name=self.settings["model"], steps=steps, settings=settings)

    def html(self, path: str | os.PathLike[str], numerics: Numbers | Iterable[Numbers] | None = None) -> None:
        """Write one self-contained HTML page of a step, with what its numerics reports say, or others that are given.

        Raises:
          ConfigError: no step ran, or the file cannot be written.
        """
        write_page(self.profile(), path, self.numerics if numerics is None else numerics)

    @property
    def _steps_a_trip(self) -> int:
        return -(-self.steps // max(1, self.round_trips))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw loss, metrics and loss scale over the steps into a .png, .svg or .pdf file; needs `pip install 'tpuflow[plot]'`.

        Raises:
          ConfigError: matplotlib is missing, or the file cannot be written.
        """
        plot_history(self.history, f"{self.settings['model']}, {self.settings['policy']}", path)

    def as_dict(self) -> dict[str, Any]:
        """Everything but the arrays, as plain data."""
        return {
            "settings": dict(self.settings),
            "chosen": dict(self.chosen),
            "history": self.history,
            "steps": self.steps,
            "nan_steps": self.nan_steps,
            "skipped_steps": self.skipped_steps,
            "round_trips": self.round_trips,
            "eval_round_trips": self.eval_round_trips,
            "launches": self.launches,
            "hbm_bytes": self.hbm_bytes,
            "seconds": dict(self.seconds),
            "interrupted": self.interrupted,
            "resumed_at": self.resumed_at,
            **({"numerics": [report.as_dict() for report in self.numerics]} if self.numerics else {}),
        }


def check_writable(path: str | os.PathLike[str]) -> None:
    """Check that a file can be written at a path, before the training and not after it.

    Raises:
      ConfigError: it cannot.
    """
    check_path("json", path)
    target = Path(path)
    if target.is_dir():
        raise _unwritable(target, IsADirectoryError("it is a folder"))
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(handle)
        os.unlink(temporary)
    except OSError as error:
        raise _unwritable(target, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"json: cannot write {str(path)!r}: {error.strerror or error}. Give a path in an existing, writable folder.")


def _report_lines(result: TrainResult, calibration: Calibration | None) -> list[str]:
    s = result.settings
    lines = [
        f"{s['model']} trained in {s['policy']} on {_chips(s)} ({s['engine']} engine, {s['fidelity']}): "
        f"{result.steps} steps of {s['batch_size']}, {result.round_trips} round trips"
        + (f" and {result.eval_round_trips} for evaluation" if result.eval_round_trips else "")
    ]
    lines += [f"resumed after {result.resumed_at} steps"] if result.resumed_at is not None else []
    lines += [f"chosen: {', '.join(f'{name} {why}' for name, why in result.chosen.items())}"] if result.chosen else []
    lines += [_epoch_line(epoch) for epoch in result.history]
    lines += _overflow_lines(result)
    if result.nan_steps:
        first = result.nan_steps[0]
        lines.append(f"warning: {len(result.nan_steps)} steps had a loss that is not a finite number, the first was step {first + 1}")
    if result.interrupted:
        lines.append(f"interrupted by Ctrl-C after {result.steps} steps; what was trained until then is kept")
    if result.executables and result.steps:
        lines += _device_lines(result, calibration)
    total, compiling = result.seconds["total"], result.seconds["compile"]
    lines.append(f"device memory {result.hbm_bytes / 2**20:.1f} MiB; host time {total:.1f} s, of it compiling {compiling:.1f} s")
    return lines


def _chips(settings: Mapping[str, Any]) -> str:
    mesh = settings.get("mesh")
    sharding = settings.get("sharding", "ddp")
    return f"{settings['chip']}, mesh {mesh}{'' if sharding == 'ddp' else f' {sharding}'}" if mesh else settings["chip"]


def _device_lines(result: TrainResult, calibration: Calibration | None) -> list[str]:
    """What the training would have taken on the chip: its first step Program, all steps, in so many round trips."""
    program = result.executables[0].program
    trips = max(1, result.round_trips)
    time = sink_time(program, result._steps_a_trip, trips, calibration)
    took = (
        f"device time {seconds_text(time.seconds)}, {seconds_text(time.device_seconds / trips / result._steps_a_trip)} a step "
        f"({time.provenance}); matrix utilisation {time.mfu:.1%}, host {seconds_text(time.launch_picoseconds / 1e12)}"
    )
    return [took, *time.narrowed]


def _epoch_line(epoch: Mapping[str, Any]) -> str:
    losses = epoch["losses"]
    text = f"epoch {epoch['epoch']}: loss {losses[0]:.6f} to {losses[-1]:.6f}" if losses else f"epoch {epoch['epoch']}: no step"
    if "accuracy" in epoch:
        text += f", accuracy {epoch['accuracy']:.1f}%"
    if "avg_loss" in epoch:
        text += f", avg loss {epoch['avg_loss']:.6f}"
    return text


def _overflow_lines(result: TrainResult) -> list[str]:
    scales = [scale for epoch in result.history for scale in epoch["loss_scale"]]
    if not scales or result.settings["loss_scale"] == "none":
        return []
    skipped = result.skipped_steps
    which = f" (steps {', '.join(str(i + 1) for i in skipped[:8])}{', ...' if len(skipped) > 8 else ''})" if skipped else ""
    return [f"loss scale {scales[0]:g} to {scales[-1]:g}, smallest {min(scales):g}; {len(skipped)} steps skipped{which}"]
