"""The row that describes a chip: capacities, widths and rates, units in the names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chip:
    """One accelerator.

    Its matrix unit takes f32, f16 and bf16 operands as they are and accumulates in f32, integers in s32.
    """

    name: str
    cores: int
    clock_hz: float
    matrix_rows: int
    matrix_columns: int
    matrix_units: int
    vector_sublanes: int
    vector_lanes: int
    vector_units: int
    vmem_bytes: int
    acc_bytes: int
    smem_bytes: int
    hbm_bytes: int
    hbm_bytes_per_second: float
    host_bytes_per_second: float
    launch_seconds: float
    source: str = ""

    def vector_cycles(self, elems: int) -> float:
        """Cycles to put `elems` elements once through the vector lanes of one core."""
        return math.ceil(elems / (self.vector_sublanes * self.vector_lanes * self.vector_units))

    def matrix_cycles(self, kept: Sequence[int], contracted: Sequence[int]) -> float:
        """Cycles of one core's systolic arrays for a product with the given output and contracted axis lengths."""
        macs = math.prod(kept) * math.prod(contracted)
        return math.ceil(macs / (self.matrix_rows * self.matrix_columns * self.matrix_units)) + self.matrix_rows

    def hbm_cycles(self, count_bytes: int) -> float:
        """Cycles to move bytes at the full HBM bandwidth of the chip."""
        return count_bytes / self.hbm_bytes_per_second * self.clock_hz

    def tile_bytes(self, shape: tuple[int, ...], element_bytes: int) -> int:
        """On-chip bytes of a tile: its two minor axes padded to whole sublanes and lanes (32-bit sublanes pack narrower types)."""
        if not shape:
            return 4
        lanes = -(-shape[-1] // self.vector_lanes) * self.vector_lanes
        rows = shape[-2] if len(shape) > 1 else 1
        per_register = self.vector_sublanes * 4 // element_bytes if len(shape) > 1 else 1
        return math.prod(shape[:-2]) * (-(-rows // per_register) * per_register) * lanes * element_bytes
