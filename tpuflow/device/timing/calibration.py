"""Calibration: the timing model's constants that are fitted to measured times. They join a chip's row when a Program is timed, and not
before: no Program holds them, and no bytes depend on them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tpuflow.chips.chip import Chip
from tpuflow.chips.lookup import base_of
from tpuflow.chips.toml import from_mapping, read_toml
from tpuflow.device.timing.fits import FITS
from tpuflow.errors import ConfigError

UNCALIBRATED = "uncalibrated"


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the timing model takes from measurements, for the chips of a family.

    `kernel_seconds` go by between kernels, `step_seconds` before a step has its next batch, however small (in every trip of a loop that the
    host feeds, and in a launch without one). `input_bytes_per_second` is how fast the host's input pipeline makes the batches of a chip,
    beside the step before; 0: as fast as they go over the host's link. `hbm_share` and `matrix_share` are the shares of the chip's HBM
    bandwidth and of its matrix peak that are sustained, at most 1; where one is 0, the row's own (`hbm_efficiency`, `matrix_efficiency`)
    stands. `fit` says from what they are and how well they suit; every printed time says it again. `family`: the chips that it is for, by
    `family_of`; "" is any.

    Raises:
      ConfigError: a share is not from 0 to 1: a chip would be faster than its peak.
    """

    kernel_seconds: float = 1.0e-6
    step_seconds: float = 0.0
    input_bytes_per_second: float = 0.0
    hbm_share: float = 0.0
    matrix_share: float = 0.0
    fit: str = UNCALIBRATED
    family: str = ""

    def __post_init__(self) -> None:
        for name in SHARES:
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(
                    f"calibration: {name} is {getattr(self, name)!r}; expected a share of the chip's peak, from 0 to 1 (0: the row's own)."
                )

    def on(self, chip: Chip) -> Chip:
        """The chip's row with the shares that were fitted in the place of its own."""
        fitted = {field: share for name, field in SHARES.items() if (share := getattr(self, name))}
        return replace(chip, **fitted) if fitted else chip


SHARES: Mapping[str, str] = {"hbm_share": "hbm_efficiency", "matrix_share": "matrix_efficiency"}
"""Shares of a peak, and the efficiencies of a chip's row whose place they take."""

_ONE_LAUNCH = 0.55e-6
"""Between two kernels of a Sophgo processor: its launch, 0.25 us, and 0.3 us to synchronise (torch-tpu's tools/examples/tpu.json)."""
ASSUMED: Mapping[str, Calibration] = {family: Calibration(kernel_seconds=_ONE_LAUNCH, family=family) for family in ("sophgo", "ascend")}
"""By family, what is not fitted. On the Ascend the whole graph is on the chip, which starts one operator after the other; what that takes
is not published, and no fit that had it free found more than the least that it tried, 0.5 us."""


def family_of(chip: Chip) -> str:
    """What a chip's calibration is filed under: its family, or its name if it has none."""
    return chip.family or chip.name


def calibration_of(chip: Chip) -> Calibration:
    """The calibration that tpuflow has for a chip: fitted to its family's published times, or assumed."""
    family = family_of(chip)
    return replace(assumed(family), **FITS.get(family, {}))


def assumed(family: str) -> Calibration:
    """The calibration of a family before anything is fitted."""
    return ASSUMED.get(family, Calibration(family=family))


def get_calibration(calibration: str | os.PathLike[str] | Calibration) -> Calibration:
    """A `Calibration` as it is, or that of a .toml file with its fields at the top level, as `tpuflow calibrate -o` writes it. With
    `base = "tpu-v4"` a file needs only the fields that differ from what tpuflow has for that chip.

    Raises:
      ConfigError: the file cannot be read, or a field is unknown, of another type, or not a possible number; the base is no chip.
    """
    if isinstance(calibration, Calibration):
        return calibration
    path = Path(calibration)
    row = read_toml(path, "calibration", "tpuflow.Calibration")
    start: dict[str, Any] = {"fit": f"calibrated by {path.name}"}
    if base := base_of(row, path):
        own = calibration_of(base)
        start = {**asdict(own), "fit": f"{path.name}, else {own.fit}"}
    return from_mapping(Calibration, start | row, str(path), "calibration")


@dataclass(frozen=True, slots=True)
class Machine:
    """What a Program is timed on: a chip's row, the calibration that joins it, and the row with what was fitted: the `rates` that hold."""

    chip: Chip
    calibration: Calibration
    rates: Chip = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", self.calibration.on(self.chip))

    @classmethod
    def of(cls, chip: Chip, calibration: Calibration | None = None) -> Machine:
        """A chip with a calibration, its own if none is given.

        Raises:
          ConfigError: the calibration is of another family.
        """
        if calibration is None:
            return cls(chip, calibration_of(chip))
        if calibration.family not in ("", family_of(chip)):
            raise ConfigError(
                f"calibration: fitted for chips of the family {calibration.family!r}; {chip.name!r} is of {family_of(chip)!r}. "
                "Give one of that family, or none for the calibration that tpuflow has."
            )
        return cls(chip, calibration)

    @property
    def provenance(self) -> str:
        """What every printed time must say."""
        return f"modelled on {self.chip.name}, {self.calibration.fit}"
