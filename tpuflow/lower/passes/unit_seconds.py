"""What a chip's memory and its vector unit take, in seconds from the chip's row: the closed forms by which passes compare."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tpuflow.chips import Chip
from tpuflow.chips.chip import LANE_BYTES
from tpuflow.dtypes import PRED
from tpuflow.isa.elementwise import OPERATIONS
from tpuflow.lower.graph.blocking import ceil_div
from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.graph.ops import ELEMENTWISE
from tpuflow.lower.graph.products import contraction_of, sizes_of
from tpuflow.lower.passes.region_builder import bytes_of
from tpuflow.lower.tiling import MATRIX_EDGE, UNHIDDEN

FILLED_SHARE = 0.95  # of the chip's memory: the rest is for gaps between arrays
HELD_MOVES = 2.0  # moves of a byte that it is worth to hold it no longer: storing and loading it once more


def move_seconds(count_bytes: float, chip: Chip) -> float:
    """All cores together move so many bytes from or to HBM."""
    return count_bytes / (chip.core_bandwidth(chip.cores) * chip.cores)


def held_seconds(count_bytes: float, chip: Chip) -> float:
    """What it is worth to hold so many bytes no longer."""
    return HELD_MOVES * move_seconds(count_bytes, chip)


def start_seconds(chip: Chip) -> float:
    """A kernel more: the start-ups of moves that nothing hides."""
    return UNHIDDEN * chip.dma_seconds


def work_seconds(nodes: Iterable[Node], chip: Chip) -> float:
    """The vector units of all cores do the work of some nodes."""
    return sum(_cycles(node, chip) for node in nodes) / (chip.cores * chip.clock_hz)


def _cycles(node: Node, chip: Chip) -> float:
    """What enters stretched, and what is one number, is addressed where it lies."""
    special = node.op in OPERATIONS and OPERATIONS[node.op].special
    passes = chip.special_passes if special else int(is_work(node) or (node.op == "broadcast" and node.inputs[0].dtype != PRED))
    if not passes:
        return 0.0
    largest = max((*node.inputs, *node.results), key=lambda v: v.type.elems)
    return passes * chip.vector_cycles(largest.shape, LANE_BYTES)


def multiplied_seconds(product: Node, chip: Chip, rows: int = MATRIX_EDGE) -> float:
    """The arrays' time for a product of which so many rows are there at a time, and for reading its results."""
    sizes, dtype = sizes_of(product), product.inputs[0].dtype.name
    batch, m, n, k = (math.prod(sizes[x] for x in labels) for labels in contraction_of(product).roles)
    few = max(1.0, chip.matrix_rows / max(rows, 1))
    cycles = few * chip.matrix_cycles(batch, m, n, k, dtype) + chip.vector_cycles(product.result.shape, LANE_BYTES)
    return cycles / (chip.cores * chip.clock_hz)


def product_seconds(product: Node, chip: Chip, extra_bytes: int = 0) -> float:
    """A product's kernel moves what its tiles read and make, and `extra_bytes`, while the arrays work."""
    moved = sum(times_read(product, v) * bytes_of(v.type) for v in dict.fromkeys(product.inputs)) + bytes_of(product.result.type)
    return max(move_seconds(moved + extra_bytes, chip), multiplied_seconds(product, chip))


def is_work(node: Node) -> bool:
    """Whether a node is one for the vector unit."""
    return node.op in ELEMENTWISE or node.op == "reduce"


def total_bytes(values: Iterable[Value]) -> int:
    """Size of values in memory."""
    return sum(bytes_of(v.type) for v in values)


def times_read(product: Node, operand: Value, side: int = MATRIX_EDGE) -> int:
    """How often the tiles of a product, of so many rows and columns, read all of an operand: the left one for each tile of columns, the
    right one for each of rows."""
    whole, sizes = contraction_of(product), sizes_of(product)
    others = [labels for labels, value in zip((whole.columns, whole.rows), product.inputs, strict=True) if value is operand]
    return sum(ceil_div(math.prod(sizes[x] for x in labels), side) for labels in others)
