"""Efficiency constants by chip family; written by `python -m bench.accuracy --fit` from published times (docs/accuracy.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FITS: Mapping[str, Mapping[str, Any]] = {
    "ascend": {
        "kernel_seconds": 2.737e-06,
        "step_seconds": 0.0009,
        "hbm_share": 1.0,
        "fit": "fit to 18 measured rows, median error 16% (50% with a model left out)",
    },
    "tpu": {
        "kernel_seconds": 5.437e-07,
        "hbm_share": 1.0,
        "fit": "fit to 17 measured rows, median error 10% (13% with a model left out)",
    },
}
