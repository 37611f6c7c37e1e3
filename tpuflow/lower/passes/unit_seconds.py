"""Seconds that a chip's memory, vector and matrix units take, from the chip's row: closed forms by which passes compare alternatives."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

from tpuflow.chips import Chip
from tpuflow.chips.chip import LANE_BYTES
from tpuflow.isa import philox
from tpuflow.isa.elementwise import OPERATIONS
from tpuflow.lower.graph.blocking import ceil_div
from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.graph.ops import ELEMENTWISE
from tpuflow.lower.graph.products import block_of, contraction_of, sizes_of
from tpuflow.lower.passes.region_builder import bytes_of
from tpuflow.lower.tiling import MATRIX_EDGE, UNHIDDEN

FILLED_SHARE = 0.95  # of the chip's HBM that a program may use: the rest is for fragmentation
_elems = operator.attrgetter("elems")
HELD_MOVES = 2.0  # price of a live byte at the memory peak, in HBM moves of a byte: offloading it would store it and load it again


def move_seconds(count_bytes: float, chip: Chip) -> float:
    """The time in which all cores together move so many bytes from or to HBM."""
    return count_bytes / (chip.core_bandwidth(chip.cores) * chip.cores)


def held_seconds(count_bytes: float, chip: Chip) -> float:
    """The most time that it is worth to spend (on recomputation, say) so that so many bytes are not live at the memory peak."""
    return HELD_MOVES * move_seconds(count_bytes, chip)


def start_seconds(chip: Chip) -> float:
    """The overhead of one more kernel: the DMA start-ups that no other work hides."""
    return UNHIDDEN * chip.dma_seconds


def work_seconds(nodes: Iterable[Node], chip: Chip) -> float:
    """The time in which the vector units of all cores compute some nodes, or their generators draw the random words of these."""
    lanes, generator = 0.0, 0.0
    for node in nodes:
        lanes += _cycles(node, chip)
        generator += philox.generator_cycles(chip, node.result.shape) if node.op == "random" else 0.0
    return max(lanes, generator) / (chip.cores * chip.clock_hz)


def _cycles(node: Node, chip: Chip) -> float:
    """Cycles of the vector unit for a node. Scalars and rows that are repeated cost nothing: they are addressed where they lie."""
    if node.op == "broadcast":
        whole, axes = node.result.shape, node.attrs["axes"]
        return 0.0 if not whole or len(whole) - 1 in axes else chip.vector_cycles(chip.column_shape(whole), LANE_BYTES)
    if node.op == "random":
        return philox.operations(chip) * chip.vector_cycles(node.result.shape, LANE_BYTES)
    special = node.op in OPERATIONS and OPERATIONS[node.op].special
    passes = chip.special_passes if special else int(is_work(node))
    if not passes:
        return 0.0
    largest = max([v.type for v in (*node.inputs, *node.results)], key=_elems)
    return passes * chip.vector_cycles(largest.shape, LANE_BYTES)


def multiplied_seconds(product: Node, chip: Chip, rows: int = MATRIX_EDGE) -> float:
    """The matrix arrays' time for a product with `rows` rows at a time, and the vector unit's for reading its results."""
    sizes, dtype = sizes_of(product), product.inputs[0].dtype.name
    batch, m, n, k = (math.prod(sizes[x] for x in labels) for labels in contraction_of(product).roles)
    few = max(1.0, chip.matrix_rows / max(rows, 1))
    cycles = few * chip.matrix_cycles(batch, m, n, k, dtype) + chip.vector_cycles(product.result.shape, LANE_BYTES)
    return cycles / (chip.cores * chip.clock_hz)


def product_seconds(product: Node, chip: Chip, extra_bytes: int = 0) -> float:
    """The time of a product's kernel: the traffic of its tiles and of `extra_bytes`, or the matrix arrays, whichever is longer."""
    moved = sum(times_read(product, v) * bytes_of(v.type) for v in dict.fromkeys(product.inputs)) + bytes_of(product.result.type)
    return max(move_seconds(moved + extra_bytes, chip), multiplied_seconds(product, chip))


def is_work(node: Node) -> bool:
    """Whether the vector unit computes the node."""
    return node.op in ELEMENTWISE or node.op == "reduce"


def total_bytes(values: Iterable[Value]) -> int:
    """Size of values in memory."""
    return sum(bytes_of(v.type) for v in values)


def times_read(product: Node, operand: Value, side: int = MATRIX_EDGE) -> int:
    """How often a product with tiles of `side` x `side` reads all of an operand: lhs once per tile of columns, rhs per tile of rows."""
    whole, sizes = contraction_of(product), sizes_of(product)
    others = [labels for labels, value in zip((whole.columns, whole.rows), product.inputs, strict=True) if value is operand]
    return sum(ceil_div(math.prod(sizes[x] for x in labels), side) for labels in others)


def step_bytes(product: Node, operand: Value, chip: Chip, element_bytes: int, side: int = 1) -> int:
    """On-chip bytes of what a step of a product reads of an operand: a block of the contraction, and `side` elements along its other axes;
    where windows slide, all that they cover.
    """
    whole, sizes = contraction_of(product), sizes_of(product)
    is_lhs = operand is product.inputs[0]
    length = dict(block_of(product))
    for label in reversed(whole.lhs if is_lhs else whole.rhs):
        if label not in length:
            length[label] = min(sizes[label], side)
            side = max(side // length[label], 1)
    shape = [length[x] for x in (whole.lhs if is_lhs else whole.rhs)]
    for outer, sliding in whole.outer.items() if is_lhs else ():
        shape[sliding.axis] = sliding.reach(length[outer], length.get(sliding.label, 1))
    return chip.tile_bytes(tuple(shape), element_bytes)
