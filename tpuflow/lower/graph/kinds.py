"""The kinds of fused kernels, and the verification of each: which nodes and shapes the region of a `fused` node may have."""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TypeVar

from tpuflow.errors import GraphError
from tpuflow.lower.graph.blocking import is_one_step
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.ops import ELEMENTWISE, ENTRIES, FUSIBLE_MOVES, PRODUCTS
from tpuflow.lower.graph.products import contraction_of, sizes_of
from tpuflow.lower.graph.rows import rows_of
from tpuflow.lower.graph.text import node_text

T = TypeVar("T")


class Kind(enum.StrEnum):
    """A kind of fused kernel. Each has a verifier below and an emission template in `emit/templates.py`."""

    MAP = "map"
    """Elementwise work over one iteration space."""
    REDUCE = "reduce"
    """Elementwise operations, reductions of their results over the same axes, and elementwise operations on those; what is not reduced may
    be a result as well."""
    DOT = "dot"
    """A product, elementwise operations on its results, and sums of these over its rows."""
    ROWS = "rows"
    """Reductions along whole rows, elementwise operations on rows and per-row values, and products that make or consume rows."""
    SEVERAL = "several"
    """Small, independent kernels that run as one (horizontal fusion)."""


def for_all(table: Mapping[Kind, T], where: str) -> Mapping[Kind, T]:
    """The table itself, after checking that it has a row for every kind."""
    missing = [kind for kind in Kind if kind not in table]
    assert not missing, f"{where} has no row for kernels of kind {', '.join(missing)}"
    return table


def verify_kernel(node: Node) -> None:
    """Check that the region of a fused node is of its kind.

    Raises:
      GraphError: the node has no kind, or its region breaks the rule of it.
    """
    kind = node.attrs["kind"]
    _require(isinstance(kind, Kind), node, f"kind is one of {', '.join(Kind)}")
    _RULES[kind](node)


def is_several(node: Node) -> bool:
    """Whether a node is of kind SEVERAL; its members that are a single tile have no tilings."""
    return node.op == "fused" and node.attrs["kind"] is Kind.SEVERAL


def _require(condition: bool, node: Node, message: str) -> None:
    if not condition:
        raise GraphError(f"{node_text(node)}: {message}")


_MADE_IN_PLACE = ELEMENTWISE | {"full", "iota"}


def _is_entry(inner: Node, region: Graph) -> bool:
    """Whether a node only broadcasts or views a region input in, or draws from one, for the iteration space."""
    return inner.op in ENTRIES and inner.inputs[0] in region.inputs


def _verify_map_nodes(node: Node, nodes: Iterable[Node], shape: tuple[int, ...]) -> None:
    (region,) = node.regions
    for inner in nodes:
        allowed = inner.op in _MADE_IN_PLACE or _is_entry(inner, region)
        _require(allowed, node, f"a map region holds elementwise nodes, and broadcasts and windows of inputs, not {node_text(inner)}")
        _require(inner.result.shape == shape, node, f"{node_text(inner)} is not of the iteration shape {shape}")


def _verify_map(node: Node) -> None:
    region = node.regions[0]
    joins = {n.result: n for n in region.nodes if n.op == "join"}
    stored = [v for out in region.outputs for v in (joins[out].inputs if out in joins else (out,))]
    shape = stored[0].shape
    _require(all(v.shape == shape for v in stored), node, "all outputs of a map, and all pieces of joined ones, have one shape")
    _require(not _users(region, joins), node, "a joined value of a map region may only be an output")
    _verify_map_nodes(node, [n for n in region.nodes if n.op != "join"], shape)


def _verify_reduce(node: Node) -> None:
    region = node.regions[0]
    reductions = [n for n in region.nodes if n.op == "reduce"]
    _require(bool(reductions), node, "a reduce region has at least one reduction")
    whole, axes = reductions[0].inputs[0].shape, reductions[0].attrs["axes"]
    same = all(n.inputs[0].shape == whole and n.attrs["axes"] == axes for n in reductions)
    _require(same, node, "all reductions of a region have one shape and the same axes")
    reduced = reductions[0].result.shape
    after = _users(region, [n.result for n in reductions])
    later = {v for n in after for v in n.results}
    shaped = all(v.shape == reduced or (v.shape == whole and v not in later) for v in region.outputs)
    _require(shaped, node, f"all outputs have the reduced shape {reduced}, or the whole one, {whole}, if they are made of no reduction")
    rest = [n for n in region.nodes if n.op != "reduce"]
    _verify_map_nodes(node, [n for n in rest if n not in after and n.result.shape == whole], whole)
    _verify_map_nodes(node, [n for n in rest if n in after or n.result.shape != whole], reduced)


def _users(region: Graph, values: Iterable[Value]) -> set[Node]:
    """The nodes that depend, directly or not, on any of the values."""
    reached, users = set(values), set()
    for inner in region.nodes:
        if not reached.isdisjoint(inner.inputs):
            users.add(inner)
            reached.update(inner.results)
    return users


def _verify_dot(node: Node) -> None:
    region = node.regions[0]
    dots = [n for n in region.nodes if n.op in PRODUCTS]
    _require(len(dots) == 1, node, "a dot region has exactly one dot or conv")
    (dot,) = dots
    shape = dot.result.shape
    before = region.nodes[: region.nodes.index(dot)]
    converted = {n.result: n for n in before if n.op == "convert" and n.inputs[0] in region.inputs}
    fed = all(v in region.inputs or v in converted for v in dot.inputs)
    _require(fed, node, "the operands of the dot are region inputs, or converts of them")
    reductions = [n for n in region.nodes if n.op == "reduce"]
    after = _users(region, [n.result for n in reductions])
    made = [v for v in region.outputs if not any(v in n.results for n in (*after, *reductions))]
    _require(all(v.shape == shape for v in made), node, f"all outputs have the dot's shape {shape}")
    prologue = {converted[v] for v in dot.inputs if v in converted}
    rest = [n for n in region.nodes if n is not dot and n not in prologue and n.op != "reduce"]
    kept = reductions[0].result.shape if reductions else shape
    _verify_map_nodes(node, [n for n in rest if n not in after and n.result.shape == shape], shape)
    _verify_map_nodes(node, [n for n in rest if n in after or n.result.shape != shape], kept)
    if reductions:
        _verify_sums(node, dot, reductions)


def _verify_sums(node: Node, dot: Node, reductions: Sequence[Node]) -> None:
    """Reductions in a dot region: of values of the dot's shape, over all axes but its columns, with the contraction in one instruction."""
    whole, shape = contraction_of(dot), dot.result.shape
    axes = tuple(i for i, x in enumerate(whole.out) if x not in whole.columns)
    same = all(n.inputs[0].shape == shape and n.attrs["axes"] == axes for n in reductions)
    _require(same, node, f"all reductions of a dot region are of its shape {shape}, over all axes but its columns: {axes}")
    one = is_one_step(whole, sizes_of(dot))
    _require(one, node, "a product whose results are reduced contracts one block, or a few along its last axis")


def _verify_several(node: Node) -> None:
    (region,) = node.regions
    fused = (Kind.MAP, Kind.REDUCE, Kind.ROWS)
    kernels = all(n.op in FUSIBLE_MOVES or (n.op == "fused" and n.attrs["kind"] in fused) for n in region.nodes)
    _require(kernels, node, f"a member of several kernels is a fused map, reduction or rows, or one of {', '.join(FUSIBLE_MOVES)}")
    apart = all(v in region.inputs for n in region.nodes for v in n.inputs)
    _require(apart, node, "kernels that run together read region inputs only, nothing of one another")
    made = tuple(v for n in region.nodes for v in n.results)
    _require(region.outputs == made, node, "the outputs are the results of all kernels, in order")


def _verify_rows(node: Node) -> None:
    region = node.regions[0]
    rows, reductions = rows_of(region.nodes), [n for n in region.nodes if n.op == "reduce"]
    _require(bool(rows.values), node, "a rows region has a reduction, or a product of values computed from another product")
    whole, axes, reduced = rows.shape, rows.axes, rows.shape[: len(rows.shape) - len(rows.axes)]
    same = all(n.inputs[0].shape == whole and n.attrs["axes"] == axes for n in reductions)
    _require(same, node, "all reductions of a region have one shape and the same axes")
    _require(axes == tuple(range(len(reduced), len(whole))), node, "the reduced axes of rows are the last ones")
    after = {p: {p.result}.union(*(n.results for n in _users(region, p.results))) for p in rows.consumers}
    outputs = [v for v in region.outputs if not any(v in values for values in after.values())]
    _require(all(v.shape in (whole, reduced) for v in outputs), node, f"all outputs are of the shapes {whole} and {reduced}")
    _verify_products_of_rows(node, whole, rows.values)
    own = _making(
        region, [*(n.inputs[0] for n in reductions), *(v for p in rows.consumers for v in p.inputs if v in rows.values), *outputs]
    )
    repeated = [n for n in own if n.op == "broadcast" and n.inputs[0] not in region.inputs]
    along = all(n.attrs["axes"] == tuple(range(len(reduced))) and n.inputs[0].shape == reduced for n in repeated)
    _require(along, node, "a broadcast in a rows region repeats a per-row value along its row")
    rest = [n for n in own if n not in reductions and n not in repeated]
    _verify_map_nodes(node, [n for n in rest if n.result.shape == whole], whole)
    _verify_map_nodes(node, [n for n in rest if n.result.shape != whole], reduced)
    for product, values in after.items():
        _verify_map_nodes(node, _making(region, [v for v in region.outputs if v in values]), product.result.shape)


def _verify_products_of_rows(node: Node, whole: tuple[int, ...], rows: Container[Value]) -> None:
    """Every product of a rows region makes rows from operands that are not rows, or has rows as exactly one operand."""
    (region,) = node.regions
    products = [n for n in region.nodes if n.op in PRODUCTS]
    sides = [[v for v in (*n.inputs, n.result) if v in rows] for n in products]
    one = all(len(found) == 1 and found[0].shape == whole for found in sides)
    _require(one, node, f"of a product's operands and result exactly one is rows, of the shape {whole}")
    converted = {n.result for n in region.nodes if n.op == "convert" and n.inputs[0] in region.inputs}
    fed = all(v in rows or v in region.inputs or v in converted for n in products for v in n.inputs)
    _require(fed, node, "operands of a product in a rows region are rows, region inputs, or converts of region inputs")


def _making(region: Graph, values: Iterable[Value]) -> list[Node]:
    """The nodes from which values are computed, up to products."""
    want, found = set(values), []
    for inner in reversed(region.nodes):
        if inner.op not in PRODUCTS and not want.isdisjoint(inner.results):
            found.append(inner)
            want.update(inner.inputs)
    return found[::-1]


_RULES: Mapping[Kind, Callable[[Node], None]] = for_all(
    {
        Kind.MAP: _verify_map,
        Kind.REDUCE: _verify_reduce,
        Kind.DOT: _verify_dot,
        Kind.ROWS: _verify_rows,
        Kind.SEVERAL: _verify_several,
    },
    __name__,
)
