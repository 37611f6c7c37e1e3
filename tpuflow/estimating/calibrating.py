"""Calibration: fits the timing model's constants for a family of chips to measured step times.

`FITTED` lists each family's constants. A step's time is linear in some of them (`kernel_seconds`, paid by every kernel, and `step_seconds`,
paid by every step); for one nonlinear constant the model is evaluated at a few values and interpolated. The fit minimises the mean of
|log(modelled / measured)|, each row capped at log(1.5), so that published times of dissimilar software do not distort the fit of the
others. It needs at least six rows for each constant.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tpuflow.chips import Chip
from tpuflow.device.timing.calibration import SHARES, Calibration, calibration_of, family_of
from tpuflow.device.timing.program import sink_time
from tpuflow.errors import ConfigError
from tpuflow.isa.program import Program

ROWS_A_CONSTANT = 6
FAR_OFF = math.log(1.5)
KERNEL_TRIED = tuple(5e-7 * 1.08**i for i in range(55))
"""0.5 us, about the least that a maker states (Sophgo: 0.25 us, and 0.3 us to synchronise), to 32 us (30 us is published for operators that
the Ascend's host launches one by one)."""
STEP_TRIED = tuple(5e-5 * i for i in range(41))  # 0 to 2 ms
UNFITTED = Calibration(kernel_seconds=0.0, step_seconds=0.0)  # constants without effect, and the row's own efficiencies
UNIT_SECONDS = 1e-6  # of a linear constant, to find what it is multiplied by


@dataclass(frozen=True, slots=True)
class Linear:
    """A constant that enters a step's time linearly: a field of `Calibration`, and the values tried."""

    name: str
    tried: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Nonlinear:
    """A constant that enters nonlinearly, a fraction of a rate: the values at which the model is evaluated (`modelled`), and those tried.

    Times between modelled values are interpolated over the reciprocal, in which the time of a kernel that the rate bounds is linear.
    """

    name: str
    modelled: tuple[float, ...]
    tried: tuple[float, ...]

    def time(self, share: float, times: Sequence[float]) -> float:
        """The time at a share, from those at the modelled ones."""
        return float(np.interp(-1 / share, [-1 / modelled for modelled in self.modelled], times))


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants that are fitted for a family."""

    linear: tuple[Linear, ...]
    nonlinear: Nonlinear

    @property
    def names(self) -> tuple[str, ...]:
        """The fields of `Calibration`."""
        return (*(c.name for c in self.linear), self.nonlinear.name)

    def without(self, value: float) -> Calibration:
        """The calibration with this value of the nonlinear constant, and with zero for the linear ones."""
        return replace(UNFITTED, **{self.nonlinear.name: value})


KERNEL, STEP = Linear("kernel_seconds", KERNEL_TRIED), Linear("step_seconds", STEP_TRIED)
LEAST_SHARE = 0.6
"""Of HBM bandwidth: what copies of 1 MB sustain by calculon's table of the A100. Copies of 33 MB sustain 0.83 on a TPU v6e, and those of
1 GB all of it on a TPU v7x (microbenchmarks of tpu-recipes): the fit looks no higher than 1."""
HBM_SHARE = Nonlinear("hbm_share", (0.6, 0.8, 1.0), tuple(round(LEAST_SHARE + 0.01 * i, 2) for i in range(41)))
USUAL = Constants((KERNEL,), HBM_SHARE)
ASCEND_SHARE = replace(HBM_SHARE, tried=tuple(share for share in HBM_SHARE.tried if share <= 0.85))
"""No more than CANN's own cost table has: 1.02 of 1.2 TB/s."""
FITTED: Mapping[str, Constants] = {"ascend": Constants((KERNEL, STEP), ASCEND_SHARE)}
"""By family; `USUAL` for those that are not named."""


def constants_of(chip: Chip) -> Mapping[str, float]:
    """The constants that are fitted for a chip's family, as tpuflow has them: a share that was not fitted is the row's own."""
    own = calibration_of(chip)
    row = own.on(chip)
    names = FITTED.get(chip.family, USUAL).names
    return {name: getattr(row, SHARES[name]) if name in SHARES else getattr(own, name) for name in names}


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measured step time. model: rows of one model are left out together in cross-validation. fitted: False for rows that are compared
    with the fit and not part of it."""

    name: str
    model: str
    chip: Chip
    seconds: float
    fitted: bool = True

    @property
    def family(self) -> str:
        """The chip's family, of which the calibration is."""
        return family_of(self.chip)

    @property
    def constants(self) -> Constants:
        """What is fitted for its chip."""
        return FITTED.get(self.chip.family, USUAL)


@dataclass(frozen=True, slots=True)
class Fit:
    """The fitted constants, and how far off the fitted rows are: median of |modelled / measured - 1|, also with each model left out."""

    constants: Mapping[str, float]
    rows: int
    median_error: float
    left_out_error: float

    @property
    def text(self) -> str:
        """The fit's description, as it is printed with modelled times."""
        return f"fit to {self.rows} measured rows, median error {self.median_error:.0%} ({self.left_out_error:.0%} with a model left out)"

    def calibration(self, family: str = "") -> Calibration:
        """The constants for the chips of a family."""
        return Calibration(**self.constants, fit=self.text, family=family)


@dataclass(frozen=True, slots=True)
class Curve:
    """The modelled time of a measured step as a function of the constants. times: at each modelled value of the nonlinear constant, with
    the linear ones zero. slopes: the factors of the linear ones."""

    measurement: Measurement
    times: Sequence[float]
    slopes: Sequence[float]

    def seconds(self, constants: Mapping[str, float]) -> float:
        """Modelled seconds a step, between the modelled values by interpolation."""
        known = self.measurement.constants
        step = known.nonlinear.time(constants[known.nonlinear.name], self.times)
        return step + sum(slope * constants[c.name] for c, slope in zip(known.linear, self.slopes, strict=True))

    def error(self, constants: Mapping[str, float]) -> float:
        """Modelled over measured, less one."""
        return self.seconds(constants) / self.measurement.seconds - 1


def curve(program: Program, steps: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The seconds a step of a Program at each modelled value of the nonlinear constant without the linear ones, and the slopes of these."""
    constants = FITTED.get(program.chip.family, USUAL)

    def seconds(calibration: Calibration) -> float:
        return sink_time(program, steps, calibration=calibration).seconds / steps

    rows = [constants.without(value) for value in constants.nonlinear.modelled]
    times = tuple(map(seconds, rows))
    slopes = ((seconds(replace(rows[0], **{c.name: UNIT_SECONDS})) - times[0]) / UNIT_SECONDS for c in constants.linear)
    return times, tuple(slopes)


def fit_curves(measured: Sequence[Curve]) -> Fit:
    """The best constants for the fitted rows among curves of one family, with the error on them, and that of leave-one-model-out.

    Raises:
      ConfigError: too few rows for the constants.
    """
    curves = [c for c in measured if c.measurement.fitted]
    names = measured[0].measurement.constants.names if measured else USUAL.names
    need = ROWS_A_CONSTANT * len(names)
    if len(curves) < need:
        raise ConfigError(f"calibrate: {len(curves)} rows for {len(names)} constants ({', '.join(names)}); at least {need} are needed.")
    found = _best(curves)
    left_out = [abs(e) for _, e in leave_one_model_out(curves)]
    errors = [abs(c.error(found)) for c in curves]
    return Fit(found, len(curves), statistics.median(errors), statistics.median(left_out))


def leave_one_model_out(curves: Sequence[Curve]) -> list[tuple[Curve, float]]:
    """Every row, those that are only compared too, with its error under constants fitted to the other models' rows."""
    found = []
    for model in dict.fromkeys(c.measurement.model for c in curves):
        others = [c for c in curves if c.measurement.model != model and c.measurement.fitted]
        if others:
            constants = _best(others)
            found += [(c, c.error(constants)) for c in curves if c.measurement.model == model]
    return found


def _best(curves: Sequence[Curve]) -> dict[str, float]:
    """Of all combinations of tried values the one with the smallest loss."""
    constants = curves[0].measurement.constants
    measured = np.array([c.measurement.seconds for c in curves])
    tried = list(itertools.product(*(c.tried for c in constants.linear)))
    added = np.array(tried) @ np.array([c.slopes for c in curves]).T  # [combinations of linear constants, rows]
    found = []
    for value in constants.nonlinear.tried:
        steps = added + [constants.nonlinear.time(value, c.times) for c in curves]
        losses = np.minimum(np.abs(np.log(steps / measured)), FAR_OFF).mean(axis=1)
        best = int(losses.argmin())
        found.append((float(losses[best]), *tried[best], value))
    return dict(zip(constants.names, min(found)[1:], strict=True))
