"""docs/peak.md, how near to its matrix peak each chip's row lets a large product come, and what bounds it: `python -m bench.peak`."""

from __future__ import annotations

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp

import tpuflow
from tpuflow.chips import CHIPS, Chip
from tpuflow.lower.graph.blocking import DEPTH

PATH = Path(__file__).parents[1] / "docs" / "peak.md"
N = 8192
BF16_BYTES, F32_BYTES = 2, 4
RESULT_BYTES = 2 * (F32_BYTES + BF16_BYTES)  # of an element of a tile: sums as they leave the accumulators and rounded, in two slots each
EDGE = 16  # elements by which tiles are tried
LONGEST = 1024

HEAD = f"""# How near to its peak

Made by `python -m bench.peak`; do not edit. The device's time of one bf16 product of {N:,} cubed, as modelled (calibrated where the chip's
family is), as a share of the time at the matrix units' peak. The host's part of a launch, 0.1 to 1 ms, is not in it: `estimate` prints it.

*At most* is a bound that holds for every tile of m x n sums that fits on the chip, each step adding a block of k = {DEPTH} products. In a
step, the arrays work for `matrix_cycles(m, n, k) / clock`; meanwhile a core loads {BF16_BYTES}k(m + n) bytes in two moves, at the better of
its share of HBM and the shared cache's rate, after `dma_seconds` each. (Where operands may stay in VMEM from kernel to kernel there need be
no loads, and the arrays alone bound it.) So

```
share <= arrays / max(arrays, {BF16_BYTES} k (m + n) / rate + 2 dma_seconds)
where  {F32_BYTES} m n <= acc_bytes  and  2 * {BF16_BYTES} k (m + n) + {RESULT_BYTES} m n <= vmem_bytes
```
On the Ascend 910 the row itself keeps large products below 0.9: with 1.25 MiB beside 256 KiB of accumulators no tile is large enough to
hide its loads at 110 GB/s a core and a microsecond a move, as long as sums leave the accumulators as f32. What lies between its bound and
its share are first loads, from HBM at a core's share of 32 GB/s, and sides that do not divide {N:,}. On the TPU v6e, whose arrays are fast
for its HBM, tiles of 1,024 x 1,024 sums, as many as its accumulators hold, load 2.3 GB, which takes longer than the arrays do: a panel of
one operand that stays in VMEM would halve that. The compiler does not do so yet. All other rows reach 0.9.

"""


def share(chip: str) -> float:
    """Of the time at the peak in the device's time of the product."""
    x = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)
    time = tpuflow.estimate(jnp.dot, x, x, chip=chip).time.device_seconds
    return 2 * N**3 / CHIPS[chip].peak_flops("bf16") / time


def bound(chip: Chip) -> float:
    """What no tile that fits can be above."""
    sides = range(EDGE, LONGEST + 1, EDGE)
    fitting = [(m, n) for m, n in itertools.product(sides, sides) if _fits(chip, m, n)]
    return max(_share_of_step(chip, m, n) for m, n in fitting)


def _fits(chip: Chip, m: int, n: int) -> bool:
    return F32_BYTES * m * n <= chip.acc_bytes and 2 * BF16_BYTES * DEPTH * (m + n) + RESULT_BYTES * m * n <= chip.vmem_bytes


def _share_of_step(chip: Chip, m: int, n: int) -> float:
    ideal = 2 * m * n * DEPTH * chip.cores / chip.peak_flops("bf16")
    arrays = chip.matrix_cycles(1, m, n, DEPTH, "bf16") / chip.clock_hz
    rate = max(chip.core_bandwidth(chip.cores), chip.core_cache_bytes_per_second)
    hidden = chip.dma_seconds * 2 + BF16_BYTES * DEPTH * (m + n) / rate if chip.array_space != "vmem" else 0.0
    return ideal / max(arrays, hidden)


def page() -> str:
    """The page with today's figures."""
    rows = [f"| {name} | {share(name):.3f} | {bound(chip):.3f} |" for name, chip in CHIPS.items()]
    return HEAD + "\n".join(("| chip | share of peak | at most |", "|---|---|---|", *rows)) + "\n"


def main() -> None:
    """Write the page."""
    PATH.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
