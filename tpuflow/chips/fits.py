"""Efficiency constants by chip family; written by `python -m bench.accuracy --fit` from published times (docs/accuracy.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FITS: Mapping[str, Mapping[str, Any]] = {
    "ascend": {
        "kernel_seconds": 2.024e-05,
        "patch_cycles": 24.0,
        "fit": "fit to 17 measured rows, median error 26% (44% with a model left out)",
    },
    "tpu": {
        "kernel_seconds": 5.871e-07,
        "traffic_share": 0.32,
        "fit": "fit to 17 measured rows, median error 13% (15% with a model left out)",
    },
}
