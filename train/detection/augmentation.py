"""How strongly pictures are changed at random for training, by the names of YOLOv5's hyperparameter files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tpuflow.errors import ConfigError

SHARES = ("hsv_h", "hsv_s", "hsv_v", "translate", "scale", "flipud", "fliplr", "mosaic", "mixup")
MOST = dict.fromkeys(SHARES, 1.0) | {"degrees": 180.0, "shear": 89.0, "perspective": 1e-3}
"""The greatest values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """Defaults are those of hyp.scratch-low.

    hsv_h, hsv_s, hsv_v: hue, saturation and value are multiplied by 1 up to so much more or less. degrees, shear: greatest angles.
    translate: greatest shift, as a share of the picture. scale: sizes are multiplied by 1 up to so much more or less. perspective: greatest
    entries of the projection's last row, 0 to 0.001. flipud, fliplr, mosaic, mixup: probabilities.

    Raises:
      ConfigError: a value is no number, or out of its range.
    """

    hsv_h: float = 0.015
    hsv_s: float = 0.7
    hsv_v: float = 0.4
    degrees: float = 0.0
    translate: float = 0.1
    scale: float = 0.5
    shear: float = 0.0
    perspective: float = 0.0
    flipud: float = 0.0
    fliplr: float = 0.5
    mosaic: float = 1.0
    mixup: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(self, MOST)


def check_ranges(numbers: Any, most: Mapping[str, float]) -> None:
    """That every field is a number from 0 to its greatest value, which those without an entry do not have.

    Raises:
      ConfigError: one is not.
    """
    for one in fields(numbers):
        value, bound = getattr(numbers, one.name), most.get(one.name, math.inf)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not 0 <= value <= bound:
            allowed = "from 0 on" if bound == math.inf else f"from 0 to {bound:g}"
            raise ConfigError(f"hyperparameter {one.name}: expected a number {allowed}, got {value!r}.")
