"""CarryConverted: a loop carries a rarely updated array also in the narrower type in which its trips read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpuflow.dtypes import DType
from tpuflow.lower.graph.graph import Graph, Node, TensorType, Value
from tpuflow.lower.passes.analysis import narrows, producers
from tpuflow.lower.passes.base import Pass


@dataclass(frozen=True, slots=True)
class CarryConverted(Pass):
    """Convert a carried array where it changes, in one branch of a switch, and not in every trip that reads it.

    Before: loop %n, %w { %h = convert %w; ... %x = switch %p, %w { add %w, %u } { %w } }.
    After: %h0 = convert %w; loop %n, %w, %h0 { ... %x, %y = switch %p, %w, %h { %w' = add %w, %u; convert %w' } { %w, %h } }.
    So weights that are updated once for several micro-batches are read in 16 bits by all of them, also behind barriers.
    Needs: no fused nodes.    Keeps: every bit.    Never: adds a carry for an array that every trip makes anew.
    """

    def __call__(self, graph: Graph) -> Graph:
        nodes: list[Node] = []
        for node in graph.nodes:
            node = self.map_regions(node)
            before, node = _carried(node) if node.op == "loop" else ((), node)
            nodes += [*before, node]
        return replace(graph, nodes=tuple(nodes))


@dataclass(frozen=True, slots=True)
class _Carry:
    """Carry number `index` of a loop, read as `dtype` in its body, and result `result` of the switch that replaces it now and then.

    `own`, `next`: what the body calls the narrow array, and what it hands on to the next trip.
    """

    index: int
    dtype: DType
    switch: Node
    result: int
    own: Value
    next: Value


def _carried(loop: Node) -> tuple[Sequence[Node], Node]:
    """(the conversions before the loop, the loop that carries their results)."""
    body, found = loop.regions[-1], list(_found(loop.regions[-1]))
    if not found:
        return (), loop
    before = [_convert(loop.inputs[1 + c.index], c.dtype) for c in found]
    nodes = _Reading({(body.inputs[c.index], c.dtype): c.own for c in found}).rewritten(body.nodes)
    for switch in {id(c.switch): c.switch for c in found}.values():
        mine = [c for c in found if c.switch is switch]
        nodes = [_switched(node, mine, body) if node.results == switch.results else node for node in nodes]
    own, following = tuple(c.own for c in found), tuple(c.next for c in found)
    region = replace(body, inputs=body.inputs + own, nodes=tuple(nodes), outputs=body.outputs + following)
    results = loop.results + tuple(Value(v.type, v.name) for v in own)
    inputs = (*loop.inputs, *(node.result for node in before))
    return before, replace(loop, inputs=inputs, results=results, regions=(region,))


def _found(body: Graph) -> Iterator[_Carry]:
    """The carries that a body reads in a narrower type, and that some branches of a switch return unchanged."""
    made, read = producers(body.nodes), _readings(body.nodes)
    for index, (value, following) in enumerate(zip(body.inputs, body.outputs, strict=True)):
        switch = made.get(following)
        if switch is None or switch.op != "switch":
            continue
        result = switch.results.index(following)
        kept = [_hands_on(switch, branch, result, value) for branch in switch.regions]
        if any(kept) and not all(kept):
            for dtype in sorted(read.get(value, ()), key=str):
                narrow = TensorType(dtype, value.shape)
                yield _Carry(index, dtype, switch, result, Value(narrow, value.name), Value(narrow, following.name))


def _hands_on(switch: Node, branch: Graph, result: int, value: Value) -> bool:
    """Whether a branch returns `value` unchanged as this result."""
    entering = dict(zip(branch.inputs, switch.inputs[1:], strict=True))
    return entering.get(branch.outputs[result]) is value


def _readings(nodes: Sequence[Node]) -> dict[Value, set[DType]]:
    """value -> the narrower floating types to which it is converted, directly or behind a barrier."""
    found: dict[Value, set[DType]] = {}
    for node in reversed(nodes):
        if narrows(node):
            found.setdefault(node.inputs[0], set()).add(node.result.dtype)
        elif node.op == "barrier":
            for value, result in zip(node.inputs, node.results, strict=True):
                if result in found:
                    found.setdefault(value, set()).update(found[result])
    return found


@dataclass(slots=True)
class _Reading:
    """Replaces conversions by narrow arrays that are `known`: (wide value, narrow type) -> narrow value."""

    known: dict[tuple[Value, DType], Value]
    renamed: dict[Value, Value] = field(default_factory=dict)

    def rewritten(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes without conversions to known arrays."""
        behind = _readings(nodes)
        made: list[Node] = []
        for node in nodes:
            if node.op == "convert" and (same := self.known.get((node.inputs[0], node.result.dtype))) is not None:
                self.renamed[node.result] = same
                continue
            node = replace(node, inputs=tuple(self.renamed.get(v, v) for v in node.inputs))
            made.append(self._held_back(node, behind) if node.op == "barrier" else node)
        return made

    def _held_back(self, barrier: Node, behind: Mapping[Value, set[DType]]) -> Node:
        """The barrier, which also passes the narrow arrays that are read behind it."""
        more: list[Value] = []
        results: list[Value] = []
        for value, result in zip(barrier.inputs, barrier.results, strict=True):
            for dtype in sorted(behind.get(result, ()), key=str):
                if (same := self.known.get((value, dtype))) is not None:
                    self.known[result, dtype] = Value(same.type, result.name)
                    more.append(same)
                    results.append(self.known[result, dtype])
        return replace(barrier, inputs=(*barrier.inputs, *more), results=(*barrier.results, *results))


def _switched(switch: Node, carries: Sequence[_Carry], body: Graph) -> Node:
    """The switch, which also returns the narrow arrays: passed on, or converted from the new wide ones."""
    regions = []
    for branch in switch.regions:
        inputs = tuple(Value(c.own.type, c.own.name) for c in carries)
        nodes, outputs = list(branch.nodes), list(branch.outputs)
        for c, given in zip(carries, inputs, strict=True):
            if not _hands_on(c.switch, branch, c.result, body.inputs[c.index]):
                nodes.append(_convert(branch.outputs[c.result], c.dtype, switch))
                given = nodes[-1].result
            outputs.append(given)
        regions.append(replace(branch, inputs=branch.inputs + inputs, nodes=tuple(nodes), outputs=tuple(outputs)))
    operands = (*switch.inputs, *(c.own for c in carries))
    return replace(switch, inputs=operands, results=(*switch.results, *(c.next for c in carries)), regions=tuple(regions))


def _convert(value: Value, dtype: DType, like: Node | None = None) -> Node:
    source, scope = (like.source, like.scope) if like is not None else ("", "")
    return Node("convert", (value,), (Value(TensorType(dtype, value.shape), value.name),), source=source, scope=scope)
