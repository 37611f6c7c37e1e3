"""What in a region that works on rows is rows, and which of its products make rows or take some."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.graph.ops import ELEMENTWISE, PRODUCTS


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a region: all `values` that are rows, their shape, and the axes along which they are reduced (none: nothing is).

    `mixing`: the products that take rows, to mix something by them or to sum over them; what is made of their results is no rows.
    """

    values: frozenset[Value]
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    mixing: tuple[Node, ...]


def rows_of(nodes: Sequence[Node]) -> Rows:
    """All that is reduced (or, if nothing is, made of products for products), and what meets that element by element."""
    reductions = [n for n in nodes if n.op == "reduce"]
    first = [n.inputs[0] for n in reductions] or _between_products(nodes)
    fresh = {n.result for n in nodes if n.op in ("full", "iota")}
    left = [n for n in nodes if n.op in ELEMENTWISE]
    rows = set(first)
    while met := [n for n in left if not rows.isdisjoint((n.result, *n.inputs))]:
        rows.update(v for n in met for v in (n.result, *n.inputs) if v not in fresh)
        left = [n for n in left if n not in met]
    mixing = tuple(n for n in nodes if n.op in PRODUCTS and not rows.isdisjoint(n.inputs))
    return Rows(frozenset(rows), first[0].shape if first else (), reductions[0].attrs["axes"] if reductions else (), mixing)


@functools.lru_cache(maxsize=512)
def rows_in(node: Node) -> Rows:
    """The rows of a fused node's region. What passes ask about is mostly asked before: the last ones are remembered."""
    return rows_of(node.regions[0].nodes)


def _between_products(nodes: Iterable[Node]) -> list[Value]:
    """What products take that is made of other products."""
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
