"""docs/peak.md, how near to its matrix peak a large product comes on each chip's row: `python -m bench.peak`."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp

import tpuflow
from tpuflow.chips import CHIPS

PATH = Path(__file__).parents[1] / "docs" / "peak.md"
N = 8192

HEAD = f"""# How near to its peak

Made by `python -m bench.peak`; do not edit. The device's time of one bf16 product of {N:,} cubed, as modelled (calibrated where the chip's
family is), as a share of the time at the matrix units' peak. The host's part of a launch, 0.1 to 1 ms, is not in it: `estimate` prints it.
No row keeps it below 0.9. What is left are the first loads, which nothing hides, accumulators that are read between products, and last
tiles that are shorter.

Two rows have to save loads for it. On the TPU v6e, whose arrays are fast for its HBM, tiles of 1,024 x 1,024 sums, as many as its
accumulators hold, would load 2.3 GB, which takes longer than the arrays do; so all of the contraction of some rows stays in VMEM while the
columns pass by. On the Ascend 910 two slots of 256 x 512 and 512 x 256 operands and of 256 x 256 results of 16 bits are all of its 1.25 MiB
beside 256 KiB of accumulators: sums leave these rounded. Its 32 cores take rectangles of such tiles, since a core's share of HBM is less
than the shared cache gives it.

"""


def share(chip: str) -> float:
    """Of the time at the peak in the device's time of the product."""
    x = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)
    time = tpuflow.estimate(jnp.dot, x, x, chip=chip).time.device_seconds
    return 2 * N**3 / CHIPS[chip].peak_flops("bf16") / time


def page() -> str:
    """The page with today's figures."""
    rows = [f"| {name} | {share(name):.3f} |" for name in CHIPS]
    return HEAD + "\n".join(("| chip | share of peak |", "|---|---|", *rows)) + "\n"


def main() -> None:
    """Write the page."""
    PATH.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
