"""HoistInvariants: loop-invariant code motion: kernels whose results are the same in every trip run once, before the loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.passes.analysis import CONTROL, effectful, invariant
from tpuflow.lower.passes.base import Pass

PIECEWISE = frozenset(("dynamic_update_slice", "scatter_rows"))


@dataclass(frozen=True, slots=True)
class HoistInvariants(Pass):
    """Move kernels that depend on nothing a loop changes out of it; the loop carries their results in, unchanged.

    Before: loop %n, %x { %z = fused{full}; ... dynamic_slice %a, %z }.    After: %z = fused{full}; loop %n, %x, %z { ... }.
    Needs: fused graph.    Keeps: every bit.
    Never: hoists what the loop would overwrite in place (a copy in every trip would take its place) or what has an effect.
    """

    def __call__(self, graph: Graph) -> Graph:
        nodes: list[Node] = []
        for node in graph.nodes:
            node = self.map_regions(node)
            hoisted, node = _hoist(node) if node.op in ("loop", "while") else ([], node)
            nodes += [*hoisted, node]
        return replace(graph, nodes=tuple(nodes))


def _hoist(loop: Node) -> tuple[list[Node], Node]:
    """The nodes that move before the loop, and the loop without them."""
    moved: list[Node] = []
    for at in range(len(loop.regions)):
        found, loop = _hoist_from(loop, at)
        moved += found
    return moved, loop


def _hoist_from(loop: Node, at: int) -> tuple[list[Node], Node]:
    region, body = loop.regions[at], loop.regions[-1]
    carries = loop.inputs[len(loop.inputs) - len(body.inputs) :]
    outside = {inner: outer for i, (inner, outer) in enumerate(zip(region.inputs, carries, strict=True)) if invariant(body, i)}
    fixed = _overwritten(region)
    moved: list[Node] = []
    for node in region.nodes:
        if _stays(node) or any(v not in outside for v in node.inputs) or not fixed.isdisjoint(node.results):
            continue
        results = tuple(Value(v.type, v.name) for v in node.results)
        moved.append(replace(node, inputs=tuple(outside[v] for v in node.inputs), results=results))
        outside.update(zip(node.results, results, strict=True))
    return (moved, _carrying(loop, at, moved, outside)) if moved else ([], loop)


def _stays(node: Node) -> bool:
    """Whether a node is not hoisted: effects, control nodes, and padding splats, which are no kernels."""
    return node.op in CONTROL or node.op == "full" or effectful(node)


def _overwritten(region: Graph) -> set[Value]:
    """Values that the region may overwrite in place: outputs, operands of piecewise updates, operands of inner loops and branches."""
    found = set(region.outputs)
    for node in region.nodes:
        if node.op in PIECEWISE:
            found.add(node.inputs[0])
        elif node.op in CONTROL:
            found.update(node.inputs)
    return found


def _carrying(loop: Node, at: int, moved: Iterable[Node], outside: dict[Value, Value]) -> Node:
    """The loop with the moved nodes' results as invariant carries; the region they come from keeps its own names for them."""
    outer = [v for node in moved for v in node.results]
    own = {new: old for old, new in outside.items()}
    regions = []
    for number, region in enumerate(loop.regions):
        inputs = tuple(own[v] if number == at else Value(v.type, v.name) for v in outer)
        gone = set(inputs)
        nodes = tuple(node for node in region.nodes if gone.isdisjoint(node.results))
        outputs = region.outputs + inputs if number == len(loop.regions) - 1 else region.outputs
        regions.append(replace(region, inputs=region.inputs + inputs, nodes=nodes, outputs=outputs))
    results = loop.results + tuple(Value(v.type, v.name) for v in outer)
    return replace(loop, inputs=(*loop.inputs, *outer), results=results, regions=tuple(regions))
