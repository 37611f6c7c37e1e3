"""What kernels need on a chip, roughly, and what they could compute themselves: questions of the passes that move work between them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tpuflow.chips import Chip
from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.graph.ops import ELEMENTWISE, PRODUCTS
from tpuflow.lower.graph.products import contraction_of, sizes_of
from tpuflow.lower.passes.outline import times_read, weight
from tpuflow.lower.passes.region_builder import bytes_of, is_kernel

MAX_NODES = 256


def takes(reader: Node, value: Value) -> bool:
    """Whether a kernel only uses an operand element by element, so that it could compute it as well as read it."""
    if not is_kernel(reader, "map", "reduce", "dot", "rows"):
        return False
    (region,) = reader.regions
    own = {o for o, outer in zip(region.inputs, reader.inputs, strict=True) if outer is value}
    users = [n for n in region.nodes if not own.isdisjoint(n.inputs)]
    multiplied = {v for n in region.nodes if n.op in PRODUCTS for v in n.inputs}
    plain = (*ELEMENTWISE, "reduce") if is_kernel(reader, "reduce", "rows") else tuple(ELEMENTWISE)
    return own.isdisjoint(region.outputs) and all(n.op in plain and multiplied.isdisjoint(n.results) for n in users)


def row_bytes(nodes: Iterable[Node], chip: Chip) -> int:
    """What a row of everything that row kernels move or make takes on a chip, at most: two slots of what is moved, one of what is made."""
    kernels = list(nodes)
    first = next(n for n in kernels[0].regions[0].nodes if n.op == "reduce")
    row = tuple(first.inputs[0].shape[a] for a in first.attrs["axes"])
    moved = dict.fromkeys(v for n in kernels for v in (*n.inputs, *n.results))
    made = [v for n in kernels for inner in n.regions[0].nodes for v in inner.results]
    return chip.tile_bytes((1, *row), 4) * (2 * len(moved) + len(made))


def seconds(node: Node, chip: Chip) -> float:
    """The time of a kernel at the rates of the part of the chip that it keeps busiest: memory, vector or matrix units."""
    (region,) = node.regions
    product = next((n for n in region.nodes if n.op in PRODUCTS), None)
    inner = dict(zip(node.inputs, region.inputs, strict=True))
    moved = sum(bytes_of(v.type) * max(1, _times(product, inner[v])) for v in inner) + sum(bytes_of(v.type) for v in node.results)
    worked = sum(weight(n) * (n.inputs[0] if n.op == "reduce" else n.result).type.elems for n in region.nodes if _is_work(n))
    lanes = chip.cores * chip.vector_units * chip.vector_sublanes * chip.vector_lanes
    multiplied = 0.0 if product is None else 2 * _multiplications(product) / chip.peak_flops(product.inputs[0].dtype.name)
    return max(moved / (chip.core_bandwidth(chip.cores) * chip.cores), worked / (lanes * chip.clock_hz), multiplied)


def _times(product: Node | None, value: Value) -> int:
    return 1 if product is None else times_read(product, value)


def _is_work(node: Node) -> bool:
    return node.op in ELEMENTWISE or node.op == "reduce"


def _multiplications(product: Node) -> int:
    whole, sizes = contraction_of(product), sizes_of(product)
    return math.prod(sizes[x] for x in (*whole.out, *whole.contracted))
