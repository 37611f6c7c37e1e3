"""Rows in the region of a kernel of `Kind.ROWS`: which values are rows, and which products consume them.

Rows are arrays that the kernel reduces along their last axes while they are on the chip, such as the scores of a softmax, and every value
that is connected with these by elementwise operations.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.graph.ops import ELEMENTWISE, PRODUCTS


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a region: all `values` that are rows, their common shape, and the `axes` along which they are reduced (if any).

    `consumers`: the products with rows as an operand, such as weights @ values of attention. What is computed from their results is not
    rows.
    """

    values: frozenset[Value]
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    consumers: tuple[Node, ...]


def rows_of(nodes: Sequence[Node]) -> Rows:
    """The rows among nodes: the operands of reductions (if there are none, what one product hands on to another), and whatever is connected
    with them by elementwise nodes.
    """
    reductions = [n for n in nodes if n.op == "reduce"]
    first = [n.inputs[0] for n in reductions] or _between_products(nodes)
    fresh = {n.result for n in nodes if n.op in ("full", "iota")}
    left = [n for n in nodes if n.op in ELEMENTWISE]
    rows = set(first)
    while met := [n for n in left if not rows.isdisjoint((n.result, *n.inputs))]:
        rows.update(v for n in met for v in (n.result, *n.inputs) if v not in fresh)
        left = [n for n in left if n not in met]
    consumers = tuple(n for n in nodes if n.op in PRODUCTS and not rows.isdisjoint(n.inputs))
    return Rows(frozenset(rows), first[0].shape if first else (), reductions[0].attrs["axes"] if reductions else (), consumers)


@functools.lru_cache(maxsize=512)
def rows_in(node: Node) -> Rows:
    """The rows of a fused node's region, cached because several passes ask for the same node."""
    return rows_of(node.regions[0].nodes)


def _between_products(nodes: Iterable[Node]) -> list[Value]:
    """The operands of products that are computed from the results of other products."""
    made: set[Value] = set()
    taken: list[Value] = []
    for node in nodes:
        met = [v for v in node.inputs if v in made]
        if node.op in PRODUCTS:
            taken += met
            made.update(node.results if not met else ())
        elif met:
            made.update(node.results)
    return taken
