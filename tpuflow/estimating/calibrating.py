"""Calibration: fits the timing model's constants for a family of chips to measured step times.

`FITTED` lists each family's constants. A step's time is linear in some of them (`kernel_seconds`, paid by every kernel, and `step_seconds`,
paid by every step); for one nonlinear constant the model is evaluated at a few values and interpolated; a step takes no less than the input
pipeline takes for its batch. The fit minimises the mean of |log(modelled / measured)|, each row capped at log(1.5), so that published times
of dissimilar software do not distort the fit of the others. No input pipeline is found slower than a row shows that one can be: a batch is
made within the step that was measured. The fit needs at least six rows for each constant.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tpuflow.chips import Chip
from tpuflow.device.timing.calibration import SHARES, Calibration, assumed, calibration_of, family_of
from tpuflow.device.timing.program import sink_time
from tpuflow.errors import ConfigError
from tpuflow.isa.program import Program

ROWS_A_CONSTANT = 6
FAR_OFF = math.log(1.5)
KERNEL_TRIED = tuple(5e-7 * 1.08**i for i in range(55))
"""0.5 us, about the least that a maker states (Sophgo: 0.25 us, and 0.3 us to synchronise), to 32 us (30 us is published for operators that
the Ascend's host launches one by one)."""
STEP_TRIED = tuple(5e-5 * i for i in range(41))  # 0 to 2 ms
INPUT_TRIED = tuple(float(f"{5e8 * 1.02**i:.4g}") for i in range(211))
"""0.5 GB/s, which is less than any pipeline's with published steps (MindCV's ResNet-50, at 1,019 pictures a second and chip on two
generations of the Ascend alike, has 0.61 GB/s in f32), to the 32 GB/s of the host's link."""
UNIT_SECONDS = 1e-6  # of a linear constant, to find what it is multiplied by
SLOWER = 1e4  # how much longer than a step an input pipeline takes that every step waits for


@dataclass(frozen=True, slots=True)
class Linear:
    """A constant that enters a step's time linearly: a field of `Calibration`, and the values tried. on_device: it goes by on the chip, and
    the input pipeline works meanwhile."""

    name: str
    tried: tuple[float, ...]
    on_device: bool


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
    """The constants that are fitted for a family. inputs: the values tried of `INPUT`, none where it is not fitted."""

    linear: tuple[Linear, ...]
    nonlinear: Nonlinear
    inputs: tuple[float, ...] = ()

    @property
    def tried(self) -> Mapping[str, tuple[float, ...]]:
        """Every constant, a field of `Calibration`, and the values tried."""
        inputs = {INPUT: self.inputs} if self.inputs else {}
        return {**{c.name: c.tried for c in self.linear}, self.nonlinear.name: self.nonlinear.tried, **inputs}

    def without(self, family: str, value: float) -> Calibration:
        """The calibration with this value of the nonlinear constant, with the others that are fitted without effect."""
        return replace(assumed(family), **dict.fromkeys((c.name for c in self.linear), 0.0), **{self.nonlinear.name: value})


INPUT = "input_bytes_per_second"
KERNEL = Linear("kernel_seconds", KERNEL_TRIED, on_device=True)
STEP = Linear("step_seconds", STEP_TRIED, on_device=False)
LEAST_SHARE = 0.6
"""Of HBM bandwidth: what copies of 1 MB sustain by calculon's table of the A100. Copies of 33 MB sustain 0.83 on a TPU v6e, and those of
1 GB all of it on a TPU v7x (microbenchmarks of tpu-recipes): the fit looks no higher than 1."""
HBM_SHARE = Nonlinear("hbm_share", (0.6, 0.8, 1.0), tuple(round(LEAST_SHARE + 0.01 * i, 2) for i in range(41)))
USUAL = Constants((KERNEL,), HBM_SHARE)
ASCEND_SHARE = replace(HBM_SHARE, tried=tuple(share for share in HBM_SHARE.tried if share <= 0.85))
"""No more than CANN's own cost table has: 1.02 of 1.2 TB/s."""
FITTED: Mapping[str, Constants] = {"ascend": Constants((STEP,), ASCEND_SHARE, INPUT_TRIED)}
"""By family; `USUAL` for those that are not named."""


def constants_of(chip: Chip) -> Mapping[str, float]:
    """The constants that are fitted for a chip's family, as tpuflow has them: a share that was not fitted is the row's own."""
    own = calibration_of(chip)
    row = own.on(chip)
    names = FITTED.get(chip.family, USUAL).tried
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
    """The fitted constants, and how far off the fitted rows are: median of |modelled / measured - 1|, also with each model left out.
    ranges: the least and the greatest value of each constant in fits with a model left out."""

    constants: Mapping[str, float]
    rows: int
    median_error: float
    left_out_error: float
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The fit's description, as it is printed with modelled times."""
        return f"fit to {self.rows} measured rows, median error {self.median_error:.0%} ({self.left_out_error:.0%} with a model left out)"

    def calibration(self, family: str = "") -> Calibration:
        """The constants for the chips of a family."""
        return replace(assumed(family), **self.constants, fit=self.text)


@dataclass(frozen=True, slots=True)
class Curve:
    """The modelled time of a measured step as a function of the constants. times: at each modelled value of the nonlinear constant, with
    the linear ones zero and no input pipeline. slopes: the factors of the linear ones. input_bytes: what the input pipeline makes for a
    step; outside_seconds: what goes by in a step while it makes nothing, that of a launch for example."""

    measurement: Measurement
    times: Sequence[float]
    slopes: Sequence[float]
    input_bytes: float = 0.0
    outside_seconds: float = 0.0

    def seconds(self, constants: Mapping[str, float]) -> float:
        """Modelled seconds a step, between the modelled values by interpolation."""
        known = self.measurement.constants
        linear = np.array([[constants[c.name] for c in known.linear]])
        busy, made = self.busy(linear, constants[known.nonlinear.name]), self.made(constants.get(INPUT, 0.0))
        return float((np.maximum(busy, made) + self.after(linear))[0])

    def busy(self, linear: np.ndarray, share: float) -> np.ndarray:
        """Seconds for which the chip works on a step, at each row of values of the linear constants and a share."""
        known = self.measurement.constants
        return known.nonlinear.time(share, self.times) + self._slopes(linear, on_device=True)

    def made(self, rate: float) -> float:
        """Seconds until the next batch is there; 0 without an input pipeline."""
        return self.outside_seconds + self.input_bytes / rate if rate else 0.0

    def after(self, linear: np.ndarray) -> np.ndarray:
        """Seconds that go by when both are done."""
        return self._slopes(linear, on_device=False)

    def _slopes(self, linear: np.ndarray, *, on_device: bool) -> np.ndarray:
        known = self.measurement.constants.linear
        return linear @ [slope * (c.on_device == on_device) for c, slope in zip(known, self.slopes, strict=True)]

    def error(self, constants: Mapping[str, float]) -> float:
        """Modelled over measured, less one."""
        return self.seconds(constants) / self.measurement.seconds - 1


def curve(program: Program, steps: int) -> tuple[tuple[float, ...], tuple[float, ...], float, float]:
    """A Program's `Curve`: its times, slopes, input bytes and outside seconds, of one of so many steps in a launch."""
    constants = FITTED.get(program.chip.family, USUAL)

    def seconds(calibration: Calibration) -> float:
        return sink_time(program, steps, calibration=calibration).seconds / steps

    rows = [constants.without(family_of(program.chip), value) for value in constants.nonlinear.modelled]
    times = tuple(map(seconds, rows))
    slopes = tuple((seconds(replace(rows[0], **{c.name: UNIT_SECONDS})) - times[0]) / UNIT_SECONDS for c in constants.linear)
    fed = sink_time(program, steps).feed_bytes / steps
    if not constants.inputs or not fed:
        return times, slopes, 0.0, 0.0
    rate = fed / times[0] / SLOWER
    made, twice = (seconds(replace(rows[0], **{INPUT: r})) for r in (rate, 2 * rate))
    return times, slopes, 2 * rate * (made - twice), 2 * twice - made


def fit_curves(measured: Sequence[Curve]) -> Fit:
    """The best constants for the fitted rows among curves of one family, with the error on them, and that of leave-one-model-out.

    Raises:
      ConfigError: too few rows for the constants, or all of one model.
    """
    curves = [c for c in measured if c.measurement.fitted]
    names = measured[0].measurement.constants.tried if measured else USUAL.tried
    need = ROWS_A_CONSTANT * len(names)
    if len(curves) < need:
        raise ConfigError(f"calibrate: {len(curves)} rows for {len(names)} constants ({', '.join(names)}); at least {need} are needed.")
    found, without = _best(curves), fits_without(curves)
    if not without:
        raise ConfigError(
            f"calibrate: all {len(curves)} rows are of {curves[0].measurement.model!r}; give rows of another model too, which show how far "
            "off one is that is not in the fit (the column 'model' says which rows are of one)."
        )
    left_out = [abs(c.error(without[c.measurement.model])) for c in curves if c.measurement.model in without]
    errors = [abs(c.error(found)) for c in curves]
    ranges = {name: (min(f[name] for f in without.values()), max(f[name] for f in without.values())) for name in found}
    return Fit(found, len(curves), statistics.median(errors), statistics.median(left_out), ranges)


def fits_without(curves: Sequence[Curve]) -> dict[str, dict[str, float]]:
    """Every model of these rows, those that are only compared too, with the constants fitted to the other models' rows."""
    found = {}
    for model in dict.fromkeys(c.measurement.model for c in curves):
        others = [c for c in curves if c.measurement.model != model and c.measurement.fitted]
        if others:
            found[model] = _best(others)
    return found


def leave_one_model_out(curves: Sequence[Curve]) -> list[tuple[Curve, float]]:
    """Every row, with its error under constants fitted to the other models' rows."""
    without = fits_without(curves)
    return [(c, c.error(without[c.measurement.model])) for c in curves if c.measurement.model in without]


def _best(curves: Sequence[Curve]) -> dict[str, float]:
    """Of all combinations of tried values the one with the smallest loss."""
    constants = curves[0].measurement.constants
    measured = np.array([c.measurement.seconds for c in curves])
    tried = list(itertools.product(*(c.tried for c in constants.linear)))
    linear = np.array(tried)
    after = np.stack([c.after(linear) for c in curves], axis=1)  # [combinations of linear constants, rows]
    found = []
    for share in constants.nonlinear.tried:
        busy = np.stack([c.busy(linear, share) for c in curves], axis=1)
        for rate in constants.inputs or (0.0,):
            made = np.array([c.made(rate) for c in curves])
            steps = np.maximum(busy, made) + after
            losses = np.minimum(np.abs(np.log(steps / measured)), FAR_OFF).mean(axis=1)
            losses += (made + after > measured).sum(axis=1)  # more than any loss: these were fed faster than that
            best = int(losses.argmin())
            found.append((float(losses[best]), *tried[best], share, rate))
    return dict(zip(constants.tried, min(found)[1:], strict=False))  # a rate that is not fitted has no name
