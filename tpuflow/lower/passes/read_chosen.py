"""ReadChosen: code that is only used if a condition holds reads the result of a select by that condition instead of its operand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.passes.analysis import effectful, producers
from tpuflow.lower.passes.base import Pass

_Side = tuple[Value, int]
"""A 0-d condition, and the operand of a select that it takes: 1 where it holds, 2 where it does not."""


@dataclass(frozen=True, slots=True)
class ReadChosen(Pass):
    """Where all readers of a value are used only if a condition holds, let them read the select that keeps the value by this condition.

    Before: %m = add %a, %b; %k = select %p, %m, %old; %u = mul %m, %c; %x = select %p, %u, %zero.    After: %u = mul %k, %c.
    So a state that is updated only in good steps is read and written in one place: %m need not be stored, nor made twice.
    Needs: nothing.    Keeps: the bits of every output.    Never: makes anything wait for a condition that is decided later.
    """

    def __call__(self, graph: Graph) -> Graph:
        nodes = tuple(self.map_regions(node) for node in graph.nodes)
        decided = _decided(nodes, graph.outputs)
        place = {value: i for i, node in enumerate(nodes) for value in node.results}
        made, users = producers(nodes), Counter(value for node in nodes for value in node.inputs)
        early: dict[int, list[Node]] = {}
        chosen: dict[Value, Value] = {}
        for node in nodes:
            for value, side in _kept(node, made):
                at = place.get(value, -1)
                known = all(place.get(v, -1) < at for v in _others(node, value, made))
                if known and value not in chosen and users[value] > 1 and side in decided[value]:
                    chosen[value] = node.result
                    early.setdefault(at, []).extend((*(s for s in _spread(node, made) if place[s.result] > at), node))
        return replace(graph, nodes=_moved(nodes, early, chosen)) if chosen else replace(graph, nodes=nodes)


def _kept(node: Node, made: Mapping[Value, Node]) -> list[tuple[Value, _Side]]:
    """(case, side) for both cases of a select by a 0-d condition; empty for other nodes and for elementwise conditions."""
    if node.op != "select" or node.inputs[1] is node.inputs[2]:
        return []
    condition = _number(node.inputs[0], made)
    return [] if condition.shape else [(node.inputs[side], (condition, side)) for side in (1, 2)]


def _number(condition: Value, made: Mapping[Value, Node]) -> Value:
    """The scalar of which a condition is the broadcast, else the condition itself."""
    node = made.get(condition)
    return node.inputs[0] if node is not None and node.op == "broadcast" else condition


def _decided(nodes: Sequence[Node], outputs: Sequence[Value]) -> dict[Value, frozenset[_Side]]:
    """value -> the sides of conditions that hold wherever the value is used: in other cases nothing depends on it."""
    made = producers(nodes)
    decided: dict[Value, frozenset[_Side]] = dict.fromkeys(outputs, frozenset())
    for node in reversed(nodes):
        if node.regions or effectful(node):
            asked = frozenset()
        else:
            asked = frozenset.intersection(*(decided.get(v, frozenset()) for v in node.results))
        sides = dict(_kept(node, made))
        for value in node.inputs:
            here = asked | {sides[value]} if value in sides and value is not node.inputs[0] else asked
            decided[value] = decided[value] & here if value in decided else here
    return decided


def _others(node: Node, value: Value, made: Mapping[Value, Node]) -> list[Value]:
    """The operands of a select besides `value`."""
    return [_number(v, made) if v is node.inputs[0] else v for v in node.inputs if v is not value]


def _spread(node: Node, made: Mapping[Value, Node]) -> list[Node]:
    """The broadcast of a select's condition, if there is one."""
    condition = made.get(node.inputs[0])
    return [condition] if condition is not None and condition.op == "broadcast" else []


def _moved(nodes: Sequence[Node], early: Mapping[int, Sequence[Node]], chosen: Mapping[Value, Value]) -> tuple[Node, ...]:
    """The nodes, with selects moved right after the value that they keep, from which all other readers then read it."""
    moved = {id(node) for group in early.values() for node in group}
    kept: dict[int, Node] = {}
    for i, node in enumerate(nodes):
        if id(node) not in moved:
            kept[id(node)] = replace(node, inputs=tuple(chosen.get(v, v) for v in node.inputs))
        kept |= {id(select): select for select in early.get(i, ()) if id(select) not in kept}
    return tuple(kept.values())
