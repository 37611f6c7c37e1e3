"""Reductions that move into the kernel which makes what they reduce, and kernels that are cut again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.passes.region_builder import RegionBuilder, is_kernel


def with_sums(nodes: Sequence[Node], makers: Kind, kind: Kind, takes_in: Callable[[Node, Node], bool]) -> tuple[Node, ...]:
    """The nodes, each reduction in the kernel that makes the last of its operands, where that is of kind `makers` and `takes_in` it; both
    together are of another `kind`, or the same."""
    found: list[Node | None] = list(nodes)
    made = {v: i for i, node in enumerate(nodes) for v in node.results}
    for at, reduction in enumerate(nodes):
        if not is_kernel(reduction, Kind.REDUCE):
            continue
        last = max((made.get(v, -1) for v in reduction.inputs), default=-1)
        maker = found[last] if last >= 0 else None
        if maker is not None and is_kernel(maker, makers) and takes_in(maker, reduction):
            found[last], found[at] = _joined(maker, reduction, kind), None
            made.update(dict.fromkeys(reduction.results, last))
    return tuple(node for node in found if node is not None)


def _joined(maker: Node, reduction: Node, kind: Kind) -> Node:
    """One kernel with the results of both."""
    builder = RegionBuilder()
    made = builder.inline_region(maker)
    reduced = builder.inline_region(reduction, dict(zip(maker.results, made, strict=True)))
    return builder.fused(of_kind(maker, kind), [*made, *reduced], [*maker.results, *reduction.results])


def part(node: Node, kind: Kind, nodes: Iterable[Node], operands: Mapping[Value, Value], results: Mapping[Value, Value]) -> Node:
    """A fused node of some of a region's nodes; `operands` and `results` map values of the region to values of the graph."""
    builder = RegionBuilder()
    env = {own: builder.operand(value) for own, value in operands.items()}
    builder.inline(nodes, env)
    return builder.fused(of_kind(node, kind), [env[own] for own in results], list(results.values()))


def of_kind(node: Node, kind: Kind) -> Node:
    """The fused node as one of another kind."""
    return replace(node, attrs=MappingProxyType({**node.attrs, "kind": kind}))
