"""Calibration: a few named efficiency constants of a chip family, fitted to measured times.

Two constants are fitted: `kernel_seconds`, which every kernel pays and which therefore enters linearly, and `traffic_share`, whose
effect is modelled at a few values and interpolated. The fit minimises the mean absolute logarithm of modelled over measured time, which a
single odd row cannot dominate. There are at least six rows for every constant, or the fit is refused.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tpuflow.chips import Chip
from tpuflow.device.timing.program import sink_time
from tpuflow.errors import ConfigError
from tpuflow.isa.program import Program

CONSTANTS = ("kernel_seconds", "traffic_share")
ROWS_A_CONSTANT = 6
TRAFFIC = (0.1, 0.3, 0.6, 1.0)
"""Shares at which the model is evaluated."""
TRAFFIC_TRIED = tuple(round(0.1 + 0.01 * i, 2) for i in range(91))
KERNEL_TRIED = tuple(1e-7 * 1.08**i for i in range(76))  # 0.1 us to 32 us


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
    traffic_share: float
    rows: int
    median_error: float
    left_out_error: float

    @property
    def text(self) -> str:
        """What a printed time says of it."""
        return f"fit to {self.rows} measured rows, median error {self.median_error:.0%} ({self.left_out_error:.0%} with a model left out)"

    def applied(self, chip: Chip) -> Chip:
        """The chip's row with the constants."""
        return replace(chip, kernel_seconds=self.kernel_seconds, traffic_share=self.traffic_share, fit=self.text)


@dataclass(frozen=True, slots=True)
class Curve:
    """The modelled time of a measured step over the constants: at each share of `TRAFFIC` without kernel floors, and its kernels.

    `other_seconds` are those that no constant bears on.
    """

    measurement: Measurement
    times: tuple[float, ...]
    kernels: float
    other_seconds: float = 0.0

    def seconds(self, kernel_seconds: float, traffic_share: float) -> float:
        """Modelled seconds a step, between the values of `TRAFFIC` by linear interpolation."""
        right = next(i for i, t in enumerate(TRAFFIC) if t >= traffic_share or i == len(TRAFFIC) - 1)
        left = max(0, right - 1)
        span = TRAFFIC[right] - TRAFFIC[left]
        weight = (traffic_share - TRAFFIC[left]) / span if span else 0.0
        moved = self.times[left] + weight * (self.times[right] - self.times[left])
        return moved + self.kernels * kernel_seconds + self.other_seconds

    def error(self, kernel_seconds: float, traffic_share: float) -> float:
        """Modelled over measured, less one."""
        return self.seconds(kernel_seconds, traffic_share) / self.measurement.seconds - 1


def curve(program: Program, chip: Chip, steps: int) -> tuple[tuple[float, ...], float]:
    """The seconds a step of a Program at each share of `TRAFFIC` with no kernel floor, and its kernels a step."""
    base, times, kernels = replace(chip, kernel_seconds=0.0), [], 0.0
    for share in TRAFFIC:
        time = sink_time(replace(program, chip=replace(base, traffic_share=share)), steps)
        times.append(time.seconds / steps)
        kernels = sum(row.count for row in time.kernels) / steps
    return tuple(times), kernels


def fit_curves(measured: Sequence[Curve]) -> Fit:
    """The constants that suit the fitted rows among curves best, with each model left out in turn for the second error.

    Raises:
      ConfigError: too few rows for the constants.
    """
    curves = [c for c in measured if c.measurement.fitted]
    need = ROWS_A_CONSTANT * len(CONSTANTS)
    if len(curves) < need:
        raise ConfigError(
            f"calibrate: {len(curves)} rows for {len(CONSTANTS)} constants ({', '.join(CONSTANTS)}); at least {need} are needed."
        )
    kernel, traffic = _best(curves)
    left_out = [abs(e) for _, e in leave_one_model_out(curves)]
    errors = [abs(c.error(kernel, traffic)) for c in curves]
    return Fit(kernel, traffic, len(curves), statistics.median(errors), statistics.median(left_out))


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
    kernels, measured = (np.array([f(c) for c in curves]) for f in (lambda c: c.kernels, lambda c: c.measurement.seconds))
    found = []
    for share in TRAFFIC_TRIED:
        moved = np.array([c.seconds(0.0, share) for c in curves])
        modelled = moved + kernels * np.array(KERNEL_TRIED)[:, None]  # [kernel_seconds tried, rows]
        losses = np.abs(np.log(modelled / measured)).mean(axis=1)
        best = int(losses.argmin())
        found.append((float(losses[best]), KERNEL_TRIED[best], share))
    _, kernel, share = min(found)
    return kernel, share
