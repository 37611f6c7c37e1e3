"""The catalogue as a table of text and as plain data."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

from tpuflow.chips.chip import Chip

OPERANDS = {"f32": "TFLOP/s", "f16": "TFLOP/s", "bf16": "TFLOP/s", "s8": "TOP/s"}
"""Types of matrix operands whose peak is listed, by their short names, and what they are counted in."""
WIDTH = 120


def chip_table(chips: Iterable[Chip]) -> str:
    """A line for each chip, and under the table where each row's numbers are from."""
    chips = list(chips)
    peaks = " ".join(f"{f'{t} {unit}':>12}" for t, unit in OPERANDS.items())
    heading = f"{'chip':10} {'cores':>5} {peaks}  {'HBM GiB':>7} {'HBM GB/s':>8} {'VMEM MiB a core':>15}"
    return "\n".join([heading, *map(_line, chips), *_narrowing(chips), "", *map(_source, chips)])


def chip_facts(chip: Chip) -> dict[str, Any]:
    """What the table shows of a chip, in bytes and operations a second."""
    return {
        "name": chip.name,
        "cores": chip.cores,
        "matrix_flops_per_second": {t: chip.peak_flops(t) for t in OPERANDS},
        "matrix_f32_as": chip.matrix_f32_as,
        "hbm_bytes": chip.hbm_bytes,
        "available_hbm_bytes": chip.available_hbm_bytes,
        "hbm_bytes_per_second": chip.hbm_bytes_per_second,
        "vmem_bytes": chip.vmem_bytes,
        "source": chip.source,
    }


def _line(chip: Chip) -> str:
    peaks = " ".join(f"{chip.peak_flops(t) / 1e12:11.1f}{'*' if t == 'f32' and _narrows(chip) else ' '}" for t in OPERANDS)
    memory = f"{chip.hbm_bytes / 2**30:7.1f} {chip.hbm_bytes_per_second / 1e9:8.0f} {chip.vmem_bytes / 2**20:15.2f}"
    return f"{chip.name:10} {chip.cores:5} {peaks}  {memory}"


def _narrows(chip: Chip) -> bool:
    return chip.matrix_f32_as != "f32"


def _narrowing(chips: Iterable[Chip]) -> list[str]:
    narrowed = [f"{c.name} ({c.matrix_f32_as})" for c in chips if _narrows(c)]
    return textwrap.wrap(f"* no f32 products: operands enter the matrix unit narrowed: {', '.join(narrowed)}", WIDTH) if narrowed else []


def _source(chip: Chip) -> str:
    return textwrap.fill(f"{chip.name}: {chip.source}", WIDTH, subsequent_indent="  ")
