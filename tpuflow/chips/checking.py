"""What a chip's row must be to compute with: a Program brings its own, which may say anything."""

from __future__ import annotations

import dataclasses
import math

from tpuflow.chips.chip import Chip

LEAST, MOST = 1e-9, 2**60
DIVISORS = (
    "cores", "clock_hz", "matrix_rows", "matrix_columns", "matrix_units", "matrix_inputs", "vector_sublanes", "vector_lanes",
    "vector_units", "hbm_bytes_per_second", "host_bytes_per_second", "hbm_burst_bytes", "hbm_efficiency", "matrix_efficiency",
)  # fmt: skip


def row_problem(chip: Chip) -> str:
    """What is wrong with a row; empty if nothing: numbers in [0, 2^60], those that something is divided by positive."""
    for field in dataclasses.fields(chip):
        value = getattr(chip, field.name)
        if isinstance(value, str):
            continue
        low = 0 if field.name not in DIVISORS else LEAST
        if not (math.isfinite(value) and low <= value <= MOST):
            return f"{field.name} is {value!r}; expected {'a positive' if low else 'no negative'} number, at most 2^60"
    return ""
