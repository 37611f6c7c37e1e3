"""How strongly pictures are changed at random for training, by the names of YOLOv5's hyperparameter files."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tpuflow.errors import ConfigError

PROBABILITIES = ("flipud", "fliplr", "mosaic", "mixup", "translate", "scale", "hsv_h", "hsv_s", "hsv_v")
MOST_PERSPECTIVE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """Defaults are those of hyp.scratch-low.

    hsv_h, hsv_s, hsv_v: hue, saturation and value are multiplied by 1 up to so much more or less. degrees, shear: greatest angles.
    translate: greatest shift, as a share of the picture. scale: sizes are multiplied by 1 up to so much more or less. perspective: greatest
    entries of the projection's last row, 0 to 0.001. flipud, fliplr, mosaic, mixup: probabilities.
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
        """Raise ConfigError for what is out of its range."""
        most = dict.fromkeys(PROBABILITIES, 1.0) | {"degrees": 180.0, "shear": 89.0, "perspective": MOST_PERSPECTIVE}
        for one in fields(self):
            value = getattr(self, one.name)
            if not 0 <= value <= most[one.name]:
                raise ConfigError(f"{one.name}: expected 0 to {most[one.name]:g}, got {value!r}.")
