"""PruneCarries: control nodes carry only what somebody needs, and repeat inside what is only repeated, in place of carrying it in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.passes.analysis import carry_offset, effectful, invariant, live_nodes, producers
from tpuflow.lower.passes.base import Pass


@dataclass(frozen=True, slots=True)
class PruneCarries(Pass):
    """Drop carries, operands and results that nothing depends on; move splats and broadcasts that enter a region into it.

    Before: %r:3 = loop %n, %x, %unused, %one { ... mul %a, %one ... }.    After: %r = loop %n, %x { %one = full; ... mul %a, %one ... }.
    Needs: nothing.    Keeps: the bits of every result that is used, effects.    Never: changes how often anything runs.
    """

    def __call__(self, graph: Graph) -> Graph:
        made = producers(graph.nodes)
        used = set(graph.outputs)
        kept: list[Node] = []
        for node in reversed(graph.nodes):
            if not effectful(node) and used.isdisjoint(node.results):
                continue
            if node.op in _PRUNE:
                node = _sink_repeated(_PRUNE[node.op](node, used), made, used)
                node = self.map_regions(node)
            used.update(node.inputs)
            kept.append(node)
        return replace(graph, nodes=tuple(reversed(kept)))


def _select(items: Sequence, keep: Sequence[bool]) -> tuple:
    return tuple(item for item, kept in zip(items, keep, strict=True) if kept)


def _prune_loop(node: Node, used: set[Value]) -> Node:
    """A carry is needed if its result is used, the condition reads it, or a needed carry or an effect depends on it."""
    body, skip = node.regions[-1], carry_offset(node)
    keep = _needed_carries(node, used)
    if all(keep):
        return node
    regions = [replace(condition, inputs=_select(condition.inputs, keep)) for condition in node.regions[:-1]]
    nodes = live_nodes(body.nodes, _select(body.outputs, keep))
    regions.append(replace(body, inputs=_select(body.inputs, keep), nodes=nodes, outputs=_select(body.outputs, keep)))
    inputs = node.inputs[:skip] + _select(node.inputs[skip:], keep)
    return replace(node, inputs=inputs, results=_select(node.results, keep), regions=tuple(regions))


def _needed_carries(node: Node, used: set[Value]) -> list[bool]:
    body = node.regions[-1]
    keep = [result in used for result in node.results]
    for condition in node.regions[:-1]:
        reads = _reads(condition.nodes, condition.outputs)
        keep = [k or v in reads for k, v in zip(keep, condition.inputs, strict=True)]
    while True:
        reads = _reads(body.nodes, _select(body.outputs, keep))
        wider = [k or v in reads for k, v in zip(keep, body.inputs, strict=True)]
        if wider == keep:
            return keep
        keep = wider


def _reads(nodes: Sequence[Node], outputs: Sequence[Value]) -> set[Value]:
    """Every value that outputs and effects depend on."""
    return set(outputs).union(*(node.inputs for node in live_nodes(nodes, outputs)))


def _prune_switch(node: Node, used: set[Value]) -> Node:
    """Results nobody uses go, then operands that no branch reads."""
    keep = [result in used for result in node.results]
    branches = [_with_outputs(branch, _select(branch.outputs, keep)) for branch in node.regions]
    reads = [_reads(branch.nodes, branch.outputs) for branch in branches]
    needed = [any(b.inputs[i] in r for b, r in zip(branches, reads, strict=True)) for i in range(len(node.inputs) - 1)]
    regions = tuple(replace(branch, inputs=_select(branch.inputs, needed)) for branch in branches)
    inputs = node.inputs[:1] + _select(node.inputs[1:], needed)
    return replace(node, inputs=inputs, results=_select(node.results, keep), regions=regions)


def _with_outputs(region: Graph, outputs: tuple[Value, ...]) -> Graph:
    return replace(region, nodes=live_nodes(region.nodes, outputs), outputs=outputs)


_PRUNE: dict[str, Callable[[Node, set[Value]], Node]] = {"loop": _prune_loop, "while": _prune_loop, "switch": _prune_switch}


def _sink_repeated(node: Node, made: dict[Value, Node], used: set[Value]) -> Node:
    """Operands that enter unchanged (branch operands, invariant carries) and only repeat a value: what they repeat enters there."""
    skip = 1 if node.op == "switch" else carry_offset(node)
    sunk = {i: made[v] for i, v in enumerate(node.inputs[skip:]) if v in made and _repeats(made[v]) and _only_enters(node, i, used)}
    if not sunk:
        return node
    entering = [sunk[i].inputs if i in sunk else (v,) for i, v in enumerate(node.inputs[skip:])]
    regions = tuple(_repeating(node, region, sunk) for region in node.regions)
    results = node.results if node.op == "switch" else _in_place_of(node.results, _named_after(node.results, sunk))
    return replace(node, inputs=(*node.inputs[:skip], *chain.from_iterable(entering)), results=results, regions=regions)


def _repeats(node: Node) -> bool:
    return node.op == "full" or (node.op == "broadcast" and node.inputs[0].type.elems < node.result.type.elems)


def _only_enters(node: Node, i: int, used: set[Value]) -> bool:
    return node.op == "switch" or (invariant(node.regions[-1], i) and node.results[i] not in used)


def _repeating(node: Node, region: Graph, sunk: dict[int, Node]) -> Graph:
    """The region that takes what is repeated and repeats it first."""
    entering = _named_after(region.inputs, sunk)
    made = tuple(replace(sunk[i], inputs=entering[i], results=(region.inputs[i],)) for i in sunk)
    carried = node.op != "switch" and region is node.regions[-1]
    outputs = _in_place_of(region.outputs, entering) if carried else region.outputs
    return replace(region, inputs=_in_place_of(region.inputs, entering), nodes=made + region.nodes, outputs=outputs)


def _named_after(values: Sequence[Value], sunk: dict[int, Node]) -> dict[int, tuple[Value, ...]]:
    """For each of these places, values of what its node takes, under the name of the value there."""
    return {i: tuple(Value(v.type, values[i].name) for v in node.inputs) for i, node in sunk.items()}


def _in_place_of(values: Sequence[Value], entering: dict[int, tuple[Value, ...]]) -> tuple[Value, ...]:
    return tuple(chain.from_iterable(entering.get(i, (v,)) for i, v in enumerate(values)))
