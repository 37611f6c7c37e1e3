"""The chips there are: one row each, every number with its source or marked as an assumption."""

from __future__ import annotations

import difflib

from tpuflow.chips.chip import Chip
from tpuflow.errors import ConfigError

MIB = 2**20
GIB = 2**30

CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="generic",
            cores=1,
            clock_hz=1.0e9,
            matrix_rows=128,
            matrix_columns=128,
            matrix_units=1,
            vector_sublanes=8,
            vector_lanes=128,
            vector_units=2,
            vmem_bytes=16 * MIB,
            acc_bytes=4 * MIB,
            smem_bytes=16 * 1024,
            hbm_bytes=16 * GIB,
            hbm_bytes_per_second=800e9,
            host_bytes_per_second=16e9,
            launch_seconds=100e-6,
            source="no product: a plain chip with true fp32 products, sizes between TPU v2 and v3 (assumption)",
        ),
        Chip(
            name="bm1690",
            cores=8,
            clock_hz=1.0e9,
            matrix_rows=64,
            matrix_columns=128,
            matrix_units=1,
            vector_sublanes=64,
            vector_lanes=16,
            vector_units=1,
            vmem_bytes=16 * MIB,
            acc_bytes=4 * MIB,
            smem_bytes=16 * 1024,
            hbm_bytes=128 * GIB,
            hbm_bytes_per_second=546e9,
            host_bytes_per_second=16e9,
            launch_seconds=0.55e-6,
            source="Sophgo torch-tpu tools/examples/tpu.json and tpu-mlir BM1690.h: 8 cores x 16 TF fp16, 64 lanes, 16 MB local memory a "
            "core, 128 GB LPDDR5 at 546 GB/s, launch 0.25 us + sync 0.3 us; clock, accumulators and host link are assumptions",
        ),
    )
}


def get_chip(chip: str | Chip) -> Chip:
    """The row of a chip name; a `Chip` is returned as it is.

    Raises:
      ConfigError: no chip has that name.
    """
    if isinstance(chip, Chip):
        return chip
    if chip in CHIPS:
        return CHIPS[chip]
    close = difflib.get_close_matches(str(chip), CHIPS, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"unknown chip {chip!r}.{hint} Known chips: {', '.join(sorted(CHIPS))}; or pass a tpuflow.chips.Chip of your own.")
