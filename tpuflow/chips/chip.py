"""The row that describes a chip: capacities, widths, rates and efficiencies, units in the names; closed forms of what work costs on it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

LANE_BYTES = 4  # a vector lane is 32 bits wide


@dataclass(frozen=True, slots=True)
class Chip:
    """One accelerator: what it has, how fast each part is, and how much of that it reaches.

    Matrix unit: each of a core's `matrix_units` arrays holds a block of `matrix_rows` contracted positions times `matrix_columns`
    columns and takes `matrix_inputs` rows of the other operand a cycle; a new block costs at least `matrix_load_cycles`.
    `matrix_*_passes` is how often a product of that type goes through the array (below 1: faster than f16), `matrix_f32_as` the type in
    which f32 operands enter it ("f32": as they are; "bf16": rounded, or split over three or six passes as the precision asks; "f16":
    rounded). It accumulates in f32, integers in s32.
    Vector unit: `vector_units` operations a cycle on `vector_sublanes` x `vector_lanes` lanes of 32 bits; `vector_packs` types of 16 bits
    go twice as fast (1) or not (0). A division, root or transcendental function counts as `special_passes` operations. A core's generator
    makes `random_words` random words of 32 bits a cycle while the vector unit does other work (0: it has none, the vector unit computes
    them).
    Vector memory: `vmem_bytes` a core. A move between an array that stays there and a tile goes at `vmem_bytes_per_second`, loads and
    stores each at that rate (0: no array stays there).
    HBM: `hbm_bytes_per_second` for the chip, `core_hbm_bytes_per_second` for what one core can draw (0: all of it), bursts of
    `hbm_burst_bytes`. A cache of `cache_bytes` that all cores share gives each `core_cache_bytes_per_second`, loads and stores each; of
    the first `cmem_bytes` of it (common memory) the compiler says what lies there: arrays that stay. `hbm_parameter_bytes`,
    `hbm_feature_bytes` and `hbm_collective_bytes` divide HBM where the maker does (0: undivided).
    Other chips: `link_chips` are joined by links of their own, a torus of `link_axes` axes; `link_bytes_per_second` is what a chip sends
    over all of them at once, `hop_seconds` a link's latency, and an axis of fewer than `link_ring_chips` has no way back from its end to
    its beginning. `host_chips` share a host and reach each other through it, all others through the network at a chip's share of
    `network_bytes_per_second`. `collective_seconds` go by in every collective beside its steps (tpuflow/chips/links.py).

    `power_watts` is the most that the chip draws (0: not published).

    The last group are efficiencies, which the choice of tiles weighs too: `issue_cycles` go by before an instruction, `dma_seconds` before
    a move's first byte; `hbm_efficiency` is the sustained share of the HBM bandwidth, `matrix_efficiency` that of the arrays,
    `link_efficiency` that of the links between chips. What is
    fitted to measured times is no field: it is a calibration's (`tpuflow.Calibration`), which joins when a Program is timed.

    `source` says where the numbers are from. It is debug information: a Program's hash does not depend on it.
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
    source: str = field(default="", compare=False)
    family: str = ""
    matrix_inputs: int = 1
    matrix_load_cycles: int = 0
    matrix_f32_passes: float = 1.0
    matrix_f16_passes: float = 1.0
    matrix_bf16_passes: float = 1.0
    matrix_s8_passes: float = 1.0
    matrix_f32_as: str = "f32"
    vector_packs: int = 0
    special_passes: int = 4
    random_words: int = 0
    vmem_bytes_per_second: float = 0.0
    core_hbm_bytes_per_second: float = 0.0
    hbm_burst_bytes: int = 64
    cache_bytes: int = 0
    core_cache_bytes_per_second: float = 0.0
    cmem_bytes: int = 0
    hbm_parameter_bytes: int = 0
    hbm_feature_bytes: int = 0
    hbm_collective_bytes: int = 0
    link_chips: int = 1
    link_axes: int = 1
    link_bytes_per_second: float = 0.0
    link_ring_chips: int = 1
    hop_seconds: float = 1.0e-6
    collective_seconds: float = 0.0
    host_chips: int = 1
    network_bytes_per_second: float = 0.0
    power_watts: float = 0.0
    issue_cycles: float = 10.0
    dma_seconds: float = 0.5e-6
    hbm_efficiency: float = 0.85
    matrix_efficiency: float = 1.0
    link_efficiency: float = 1.0

    # ---- rates

    @property
    def matrix_macs_per_cycle(self) -> float:
        """Multiply-adds of 16-bit floats that all cores together do in a cycle."""
        return self.cores * self.matrix_units * self.matrix_rows * self.matrix_columns * self.matrix_inputs

    def peak_flops(self, dtype: str = "bf16") -> float:
        """Matrix operations a second (an addition and a multiplication are two) on operands of a type, by its short name."""
        return 2 * self.matrix_macs_per_cycle * self.clock_hz / self.matrix_passes(dtype)

    @property
    def available_hbm_bytes(self) -> int:
        """HBM that a program may use: all but what the maker reserves for collectives."""
        return self.hbm_bytes - self.hbm_collective_bytes

    @property
    def array_space(self) -> str:
        """The memory in which arrays may stay from kernel to kernel: "cmem", "vmem", or "" if there is none.

        All cores share CMEM, so any array may stay there. In VMEM a core holds the part of an array that it alone reads and writes. Cores
        that share a cache take neighbouring points in turn, so that their reads hit it: no core then has a part to itself, and arrays stay
        nowhere."""
        if self.cmem_bytes:
            return "cmem"
        return "vmem" if self.vmem_bytes_per_second > 0 and (self.cores == 1 or not self.cache_bytes) else ""

    @property
    def keeping_cores(self) -> int:
        """The number of parts into which a resident array is divided: one for each core in VMEM; 1 in CMEM, or if arrays stay nowhere."""
        return self.cores if self.array_space == "vmem" else 1

    @property
    def resident_bytes(self) -> int:
        """Capacity of `array_space`, over all cores."""
        return {"cmem": self.cmem_bytes, "vmem": self.cores * self.vmem_bytes, "": 0}[self.array_space]

    @property
    def core_resident_bytes_per_second(self) -> float:
        """Bytes a second that a core loads from resident arrays, and as many that it stores to them at the same time."""
        return {"cmem": self.core_cache_bytes_per_second, "vmem": self.vmem_bytes_per_second, "": 0.0}[self.array_space]

    def core_bandwidth(self, cores: int) -> float:
        """Sustained HBM bytes a second of each of `cores` cores that move data at once."""
        share = self.hbm_bytes_per_second / cores
        limit = self.core_hbm_bytes_per_second or share
        return min(share, limit) * self.hbm_efficiency

    def matrix_passes(self, dtype: str) -> float:
        """How often a product of operands of this type, by its short name, goes through the array.

        Wider integers go as products of their bytes: of n bytes each, n (n + 1) / 2 of those reach the n that are kept.

        Raises:
            ValueError: the array takes no such type.
        """
        s8 = self.matrix_s8_passes
        passes = {
            "f32": self.matrix_f32_passes, "f16": self.matrix_f16_passes, "bf16": self.matrix_bf16_passes,
            "s8": s8, "u8": s8, "s16": 3 * s8, "u16": 3 * s8, "s32": 10 * s8, "u32": 10 * s8,
        }  # fmt: skip
        narrowed = self.matrix_f32_as if dtype == "f32" else dtype
        if narrowed not in passes:
            raise ValueError(f"{self.name} has no matrix products of {dtype}; expected one of {', '.join(passes)}")
        return passes[narrowed]

    # ---- cycles of one core

    def vector_cycles(self, shape: Sequence[int], element_bytes: int) -> int:
        """Cycles to put a tile once through the vector lanes: its padded registers over the units; narrow types may be packed."""
        unpacked = 1 if self.vector_packs else max(1, LANE_BYTES // element_bytes)
        register = self.vector_sublanes * self.vector_lanes * LANE_BYTES * self.vector_units
        return -(-self.tile_bytes(tuple(shape), element_bytes) * unpacked // register)

    def column_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A tile's shape, cut to the lanes of one register: what is filled where each row repeats a number."""
        return (*shape[:-1], min(shape[-1], self.vector_lanes))

    def matrix_cycles(self, batch: int, rows: int, columns: int, depth: int, dtype: str) -> int:
        """Cycles of the arrays for `batch` products [rows, depth] x [depth, columns]: the better of the two operands is held in them."""
        held = min(self._held_cycles(rows, columns), self._held_cycles(columns, rows))
        blocks = batch * held * -(-depth // self.matrix_rows)
        return math.ceil(blocks * self.matrix_passes(dtype) / (self.matrix_units * self.matrix_efficiency))

    def _held_cycles(self, streamed: int, held: int) -> int:
        return max(-(-streamed // self.matrix_inputs), self.matrix_load_cycles) * -(-held // self.matrix_columns)

    @property
    def matrix_fill_cycles(self) -> int:
        """Cycles until the last sum has left an array."""
        return self.matrix_rows + self.matrix_columns if self.matrix_inputs == 1 else self.matrix_rows

    def tile_bytes(self, shape: tuple[int, ...], element_bytes: int) -> int:
        """On-chip bytes of a tile: its two minor axes padded to whole sublanes and lanes (32-bit sublanes pack narrower types).

        A single row fills registers as a vector does, one after the other."""
        return _padded_bytes(shape, element_bytes, self.vector_lanes, self.vector_sublanes)


@functools.lru_cache(maxsize=8192)
def _padded_bytes(shape: tuple[int, ...], element_bytes: int, vector_lanes: int, vector_sublanes: int) -> int:
    """`Chip.tile_bytes`, cached: the compiler calls it a hundred thousand times for a program, with a few thousand tiles."""
    if not shape:
        return 4
    lanes = -(-shape[-1] // vector_lanes) * vector_lanes
    rows = shape[-2] if len(shape) > 1 else 1
    per_register = vector_sublanes * 4 // element_bytes if rows > 1 else 1
    return math.prod(shape[:-2]) * (-(-rows // per_register) * per_register) * lanes * element_bytes
