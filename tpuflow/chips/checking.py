"""Validation of a chip's row. A Program file contains its own, which may have any numbers; the verifier calls this."""

from __future__ import annotations

import dataclasses

from tpuflow.chips.chip import Chip

LEAST, MOST = 1e-12, 2**60
DIVISORS = (
    "cores", "clock_hz", "matrix_rows", "matrix_columns", "matrix_units", "matrix_inputs", "vector_sublanes", "vector_lanes",
    "vector_units", "hbm_bytes_per_second", "host_bytes_per_second", "hbm_burst_bytes", "hbm_efficiency", "matrix_efficiency",
    "link_efficiency", "matrix_f32_passes", "matrix_f16_passes", "matrix_bf16_passes", "matrix_s8_passes",
)  # fmt: skip


def row_problem(chip: Chip) -> str:
    """What is wrong with a row; empty if nothing. Numbers must be 0 or in [1e-12, 2^60], so that no quotient of them is infinite, and those
    of `DIVISORS` not 0."""
    for field in dataclasses.fields(chip):
        value = getattr(chip, field.name)
        if isinstance(value, str):
            continue
        positive = field.name in DIVISORS
        if not (LEAST <= value <= MOST or (value == 0 and not positive)):
            return f"{field.name} is {value!r}; expected {'a positive number,' if positive else '0, or a number'} from {LEAST} to 2^60"
    return ""
