"""Efficiency constants by chip family; written by `python -m bench.accuracy` from published times (docs/accuracy.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FITS: Mapping[str, Mapping[str, Any]] = {
    "ascend": {
        "step_seconds": 0.00095,
        "hbm_share": 0.67,
        "input_bytes_per_second": 1294000000.0,
        "fit": "fit to 18 measured rows, median error 10% (18% with a model left out)",
    },
    "tpu": {
        "kernel_seconds": 5.4e-07,
        "hbm_share": 0.99,
        "fit": "fit to 27 measured rows, median error 7% (7% with a model left out)",
    },
}
