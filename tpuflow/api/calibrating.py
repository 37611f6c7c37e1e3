"""Calibration: two named efficiency constants of a chip family, fitted to measured times.

One is `kernel_seconds`, which every kernel pays and which therefore enters linearly; the other, `traffic_share` unless asked otherwise, is
modelled at a few values and interpolated. The fit minimises the mean absolute logarithm of modelled over measured time, which a
single odd row cannot dominate. There are at least six rows for every constant, or the fit is refused.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tpuflow.chips import Chip
from tpuflow.chips.links import exposed_seconds
from tpuflow.device.timing.program import sink_time
from tpuflow.errors import ConfigError
from tpuflow.isa.program import Program

ROWS_A_CONSTANT = 6
KERNEL_TRIED = tuple(1e-7 * 1.08**i for i in range(76))  # 0.1 us to 32 us


@dataclass(frozen=True, slots=True)
class Second:
    """The second fitted constant: a field of the chip's row, the values at which the model is evaluated, and those tried."""

    name: str
    modelled: tuple[float, ...]
    tried: tuple[float, ...]

    def on(self, chip: Chip, value: float) -> Chip:
        """The chip's row with a value of it, without kernel floors."""
        return replace(chip, **{"kernel_seconds": 0.0, self.name: value})


TRAFFIC_SHARE = Second("traffic_share", (0.1, 0.3, 0.6, 1.0), tuple(round(0.1 + 0.01 * i, 2) for i in range(91)))
PATCH_CYCLES = Second("patch_cycles", (0.0, 10.0, 20.0, 40.0, 80.0), tuple(0.5 * i for i in range(161)))


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measured step: the model's name (rows of one model are left out together), and the seconds it took on the chip.

    `fitted` is False for rows that are only compared.
    """

    name: str
    model: str
    chip: Chip
    seconds: float
    fitted: bool = True


@dataclass(frozen=True, slots=True)
class Fit:
    """The fitted constants, and how far off the fitted rows are: median of |modelled / measured - 1|, also with each model left out."""

    kernel_seconds: float
    value: float
    rows: int
    median_error: float
    left_out_error: float
    second: Second = TRAFFIC_SHARE

    @property
    def constants(self) -> dict[str, float]:
        """The fitted fields of the chip's row."""
        return {"kernel_seconds": self.kernel_seconds, self.second.name: self.value}

    @property
    def text(self) -> str:
        """What a printed time says of it."""
        return f"fit to {self.rows} measured rows, median error {self.median_error:.0%} ({self.left_out_error:.0%} with a model left out)"

    def applied(self, chip: Chip) -> Chip:
        """The chip's row with the constants."""
        return replace(self.second.on(chip, self.value), kernel_seconds=self.kernel_seconds, fit=self.text)


@dataclass(frozen=True, slots=True)
class Curve:
    """The modelled time of a measured step over the constants: at each modelled value of the second without kernel floors, and its kernels.

    `sums` are those of gradients over several chips: the seconds of each, and the share of the step's time by which its gradients are ready
    before the last one.
    """

    measurement: Measurement
    times: tuple[float, ...]
    kernels: float
    sums: tuple[tuple[float, float], ...] = ()
    second: Second = TRAFFIC_SHARE

    def seconds(self, kernel_seconds: float, value: float) -> float:
        """Modelled seconds a step, between the modelled values by linear interpolation."""
        step = float(np.interp(value, self.second.modelled, self.times)) + self.kernels * kernel_seconds
        return step + exposed_seconds([(seconds, ahead * step) for seconds, ahead in self.sums])

    def error(self, kernel_seconds: float, value: float) -> float:
        """Modelled over measured, less one."""
        return self.seconds(kernel_seconds, value) / self.measurement.seconds - 1


def curve(program: Program, chip: Chip, steps: int, second: Second = TRAFFIC_SHARE) -> tuple[tuple[float, ...], float]:
    """The seconds a step of a Program at each modelled value of the second constant with no kernel floor, and its kernels a step."""
    times, kernels = [], 0.0
    for value in second.modelled:
        time = sink_time(replace(program, chip=second.on(chip, value)), steps)
        times.append(time.seconds / steps)
        kernels = sum(row.count for row in time.kernels) / steps
    return tuple(times), kernels


def fit_curves(measured: Sequence[Curve]) -> Fit:
    """The constants that suit the fitted rows among curves best, with each model left out in turn for the second error.

    Raises:
      ConfigError: too few rows for the constants.
    """
    curves = [c for c in measured if c.measurement.fitted]
    second = measured[0].second if measured else TRAFFIC_SHARE
    names = ("kernel_seconds", second.name)
    need = ROWS_A_CONSTANT * len(names)
    if len(curves) < need:
        raise ConfigError(f"calibrate: {len(curves)} rows for {len(names)} constants ({', '.join(names)}); at least {need} are needed.")
    kernel, value = _best(curves)
    left_out = [abs(e) for _, e in leave_one_model_out(curves)]
    errors = [abs(c.error(kernel, value)) for c in curves]
    return Fit(kernel, value, len(curves), statistics.median(errors), statistics.median(left_out), second)


def leave_one_model_out(curves: Sequence[Curve]) -> list[tuple[Curve, float]]:
    """Every row, those that are only compared too, with its error under constants fitted to the other models' rows."""
    found = []
    for model in dict.fromkeys(c.measurement.model for c in curves):
        others = [c for c in curves if c.measurement.model != model and c.measurement.fitted]
        if others:
            constants = _best(others)
            found += [(c, c.error(*constants)) for c in curves if c.measurement.model == model]
    return found


def _best(curves: Sequence[Curve]) -> tuple[float, float]:
    """The pair of tried constants with the smallest mean absolute logarithm of modelled over measured."""
    measured = np.array([c.measurement.seconds for c in curves])
    kernels = np.outer(KERNEL_TRIED, [c.kernels for c in curves])
    found = []
    for value in curves[0].second.tried:
        steps = kernels + [np.interp(value, c.second.modelled, c.times) for c in curves]  # [kernel_seconds tried, rows]
        losses = np.abs(np.log((steps + _exposed(curves, steps)) / measured)).mean(axis=1)
        best = int(losses.argmin())
        found.append((float(losses[best]), KERNEL_TRIED[best], value))
    _, kernel, value = min(found)
    return kernel, value


def _exposed(curves: Sequence[Curve], steps: np.ndarray) -> np.ndarray:
    """`exposed_seconds` of every row's sums at every time of its step [kernel_seconds tried, rows]."""
    exposed = np.zeros_like(steps)
    for row, curve in enumerate(curves):
        left = 0.0
        for seconds, ahead in reversed(curve.sums):
            left += seconds
            exposed[:, row] = np.maximum(exposed[:, row], left - ahead * steps[:, row])
    return exposed
