"""Efficiency constants by chip family; written by `python -m bench.accuracy --fit` from published times (docs/accuracy.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FITS: Mapping[str, Mapping[str, Any]] = {
    "ascend": {
        "kernel_seconds": 2.024e-05,
        "patch_cycles": 20.0,
        "fit": "fit to 17 measured rows, median error 27% (42% with a model left out)",
    },
    "tpu": {
        "kernel_seconds": 7.396e-07,
        "traffic_share": 0.28,
        "fit": "fit to 17 measured rows, median error 14% (14% with a model left out)",
    },
}
