"""Cost estimates of fused nodes for passes that move work between kernels: on-chip bytes and seconds, from the chip's row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from tpuflow.chips import Chip
from tpuflow.lower.graph.blocking import ceil_div
from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.ops import ELEMENTWISE, PRODUCTS
from tpuflow.lower.graph.products import block_of, contraction_of, sizes_of
from tpuflow.lower.graph.rows import Rows, rows_in
from tpuflow.lower.passes.forms import by_form
from tpuflow.lower.passes.region_builder import bytes_of, is_kernel
from tpuflow.lower.passes.unit_seconds import move_seconds, multiplied_seconds, times_read, work_seconds
from tpuflow.lower.tiling import MATRIX_EDGE, rows_tile_bytes, shrinking

MAX_NODES = 256
LEAST_ROWS = 8  # of a tile beside products: the sublanes of most chips


def uses_elementwise(reader: Node, value: Value) -> bool:
    """Whether a kernel uses an operand only elementwise, in reductions or as a piece of what it joins, so that it could recompute the
    operand instead of reading it.
    """
    if not is_kernel(reader, Kind.MAP, Kind.REDUCE, Kind.DOT, Kind.ROWS):
        return False
    (region,) = reader.regions
    own = {o for o, outer in zip(region.inputs, reader.inputs, strict=True) if outer is value}
    users = [n for n in region.nodes if not own.isdisjoint(n.inputs)]
    multiplied = {v for n in region.nodes if n.op in PRODUCTS for v in n.inputs}
    plain = ELEMENTWISE | {"reduce" if is_kernel(reader, Kind.REDUCE, Kind.ROWS) else "join"}
    return own.isdisjoint(region.outputs) and all(n.op in plain and multiplied.isdisjoint(n.results) for n in users)


def row_bytes(nodes: Iterable[Node], chip: Chip) -> int:
    """Upper bound of the on-chip bytes of one row of all arrays of row kernels: two slots for operands and results, one for others."""
    kernels = list(nodes)
    first = next(n for n in kernels[0].regions[0].nodes if n.op == "reduce")
    row = tuple(first.inputs[0].shape[a] for a in first.attrs["axes"])
    moved = dict.fromkeys(v for n in kernels for v in (*n.inputs, *n.results))
    made = [v for n in kernels for inner in n.regions[0].nodes for v in inner.results]
    return chip.tile_bytes((1, *row), 4) * (2 * len(moved) + len(made))


def rows_at_once(node: Node, chip: Chip) -> int:
    """How many rows of one batch fit on the chip at a time in a row kernel with products; 0 if fewer than the least number that it needs.

    Operands and results of products that have a row each (queries) come and go with the rows, in two slots; the others (keys) are held
    whole, in two as well, and sums over all rows in accumulators. Rows that are not reduced may be cut, down to the columns of one matrix
    array.
    """
    (region,) = node.regions
    rows, products = rows_in(node), [n for n in region.nodes if n.op in PRODUCTS]
    queries, columns = rows.shape[-2:]
    summed = [n for n in rows.consumers if sums_over_rows(n, rows)]
    least = max((math.prod(block_of(n).values()) for n in summed), default=min(LEAST_ROWS, queries))
    others = {v: with_row for n in products for v, with_row in _others(n, rows)}
    beside = sum(2 * _batch_bytes(v, chip) for v, with_row in others.items() if not with_row)
    along = sum(2 * _row_bytes(v.type.elems // math.prod(rows.shape[:-1]), chip, v.dtype.bytes) for v in others if others[v])
    sums, held = [_batch_bytes(n.result, chip) for n in summed], _most_rows(node, rows)
    narrowest = columns if rows.axes else min(columns, chip.matrix_columns)
    mixed = [n.result.type.elems // math.prod(rows.shape[:-1]) for n in rows.consumers if n not in summed]
    row, accumulated = (_row_bytes(n, chip) for n in (narrowest, max(narrowest, *mixed, 0)))
    kept = sum(sums) * narrowest / columns if least < queries else 0  # of all rows at once, one sum after the other
    if max(sums, default=0) * narrowest / columns > chip.acc_bytes:
        return 0
    most = min((chip.vmem_bytes - beside) // (row * held + along), int(chip.acc_bytes - kept) // accumulated, queries)
    if most < least:
        return 0
    tried = (min(size // row, queries) for size in shrinking(rows_tile_bytes(chip)))
    return max(next(n for n in tried if n <= most) // least, 1) * least


def sums_over_rows(product: Node, rows: Rows) -> bool:
    """Whether a product that consumes rows contracts an axis across rows, rather than along each row."""
    whole = contraction_of(product)
    labels = whole.lhs if product.inputs[0] in rows.values else whole.rhs
    return labels[-1] not in whole.contracted


def _others(product: Node, rows: Rows) -> Iterator[tuple[Value, bool]]:
    """The operands of a product and its result that are not rows, and of each whether it has the axis of the rows."""
    whole = contraction_of(product)
    sides = tuple(zip((*product.inputs, product.result), (whole.lhs, whole.rhs, whole.out), strict=True))
    row = next(labels[-2] for v, labels in sides if v in rows.values)
    return ((v, row in labels) for v, labels in sides if v not in rows.values)


def _row_bytes(width: int, chip: Chip, element_bytes: int = 4) -> int:
    """On-chip bytes of a row among others: of `width` elements."""
    rows = chip.vector_sublanes * 4 // element_bytes
    return chip.tile_bytes((rows, width), element_bytes) // rows


def _batch_bytes(value: Value, chip: Chip) -> int:
    """On-chip bytes of one batch of a product's operand or result that is not rows: its two longest axes."""
    return chip.tile_bytes(tuple(sorted(value.shape)[:-3:-1]), value.dtype.bytes)


def _most_rows(node: Node, rows: Rows) -> int:
    """The most arrays of rows that are live at once: two slots for those that pass between units, one for other intermediates."""
    (region,) = node.regions
    last = {v: i for i, n in enumerate(region.nodes) for v in n.inputs}
    sides = [v for n in region.nodes if n.op in PRODUCTS for v in (*n.inputs, n.result)]
    crossing = {v for v in (*region.inputs, *region.outputs, *sides) if v in rows.values}
    held = [0] * (len(region.nodes) + 1)
    for i, n in enumerate(region.nodes):
        for j in range(i, last.get(n.result, i) + 1):
            held[j] += n.result in rows.values and n.result not in crossing
    return 2 * len(crossing) + max(held)


def roofline_seconds(node: Node, chip: Chip) -> float:
    """The roofline time of a kernel: the longest of its memory traffic, vector work and matrix multiplications at peak rates."""
    (region,) = node.regions
    product = next((n for n in region.nodes if n.op in PRODUCTS), None)
    inner = dict(zip(node.inputs, region.inputs, strict=True))
    moved = sum(bytes_of(v.type) * max(1, _times(product, inner[v])) for v in inner) + sum(bytes_of(v.type) for v in node.results)
    multiplied = 0.0 if product is None else 2 * _multiplications(product) / chip.peak_flops(product.inputs[0].dtype.name)
    return max(move_seconds(moved, chip), work_seconds(region.nodes, chip), multiplied)


@by_form
def memory_and_compute_seconds(node: Node, chip: Chip, side: int = MATRIX_EDGE) -> tuple[float, float]:
    """(seconds of a kernel's DMAs, seconds of its vector and matrix units, which overlap but where those of a row kernel wait for another).

    side: rows and columns of a product's tiles. The rows of one batch belong to one core.
    """
    (region,) = node.regions
    products, by_rows = [n for n in region.nodes if n.op in PRODUCTS], is_kernel(node, Kind.ROWS)
    times = {o: max(1, _times(None if by_rows else next(iter(products), None), o, side)) for o in region.inputs}
    moved = sum(times[o] * bytes_of(o.type) for o in region.inputs) + sum(bytes_of(v.type) for v in node.results)
    move, work = move_seconds(moved, chip), work_seconds(region.nodes, chip)
    rows = rows_at_once(node, chip) if by_rows and products else MATRIX_EDGE
    multiply = sum(multiplied_seconds(n, chip, rows) for n in products)
    if not (by_rows and products):
        return move, max(work, multiply)
    batches = min(map(_batches, products))
    alone = min(work, multiply) / (1 if batches % 2 else 2)  # one of two parts of the batches is not beside the other
    longer = ceil_div(batches, chip.cores) * chip.cores / batches  # than if all cores had equally many
    return longer * move, longer * (max(work, multiply) + alone)


def busy_seconds(node: Node, chip: Chip) -> float:
    """The time of a kernel by the cost of its instructions: DMAs overlap with the compute units."""
    return max(memory_and_compute_seconds(node, chip))


def _batches(product: Node) -> int:
    return math.prod(sizes_of(product)[x] for x in contraction_of(product).batch)


def _times(product: Node | None, value: Value, side: int = MATRIX_EDGE) -> int:
    return 1 if product is None else times_read(product, value, side)


def _multiplications(product: Node) -> int:
    whole, sizes = contraction_of(product), sizes_of(product)
    return math.prod(sizes[x] for x in (*whole.out, *whole.contracted))
