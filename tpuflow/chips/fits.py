"""Efficiency constants by chip family; written by `python -m bench.accuracy --fit` from published times (docs/accuracy.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FITS: Mapping[str, Mapping[str, Any]] = {
    "ascend": {
        "kernel_seconds": 3.212e-05,
        "traffic_share": 0.99,
        "fit": "fit to 17 measured rows, median error 30% (44% with a model left out)",
    },
    "tpu": {
        "kernel_seconds": 6.341e-07,
        "traffic_share": 0.1,
        "fit": "fit to 17 measured rows, median error 14% (18% with a model left out)",
    },
}
