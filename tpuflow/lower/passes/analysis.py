"""Analyses shared by passes: definitions, liveness, dependence, loop invariance, equality of nodes."""

from __future__ import annotations

import heapq
import struct
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.ops import OPS, has_effect

CONTROL = frozenset(("loop", "while", "switch"))


def producers(nodes: Iterable[Node]) -> dict[Value, Node]:
    """The node that defines each value (graph inputs are absent)."""
    return {value: node for node in nodes for value in node.results}


def effectful(node: Node) -> bool:
    """Whether the node, or one in its regions, communicates with the host; such nodes are neither removed nor reordered."""
    return has_effect(node.op, node.regions) if node.regions else OPS[node.op].effect


def live_nodes(nodes: Sequence[Node], outputs: Iterable[Value]) -> tuple[Node, ...]:
    """The nodes whose results reach an output or that have an effect, in order."""
    needed = set(outputs)
    kept: list[Node] = []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.results) or effectful(node):
            kept.append(node)
            needed.update(node.inputs)
    return tuple(reversed(kept))


def dataflow_order(nodes: Sequence[Node | None]) -> Sequence[int] | None:
    """The positions of nodes in an order in which what a node reads precedes it, and effects stay in theirs; as they are, as far as that is
    possible. None if there is no such order.
    """
    made = {v: at for at, node in enumerate(nodes) if node is not None for v in node.results}
    needs: list[set[int]] = []
    last = -1
    for at, node in enumerate(nodes):
        needed = {made[v] for v in node.inputs if v in made} if node is not None else set[int]()
        if node is not None and effectful(node):
            needed |= {last} if last >= 0 else set()
            last = at
        needs.append(needed)
    if all(max(needed, default=-1) < at for at, needed in enumerate(needs)):
        return range(len(nodes))
    return _sorted(needs)


def _sorted(needs: Sequence[set[int]]) -> Sequence[int] | None:
    """Positions in an order in which those that each needs precede it, the first of those that are possible next; None if there is none."""
    waits = [len(needed) for needed in needs]
    readers: dict[int, list[int]] = {}
    for at, needed in enumerate(needs):
        for other in needed:
            readers.setdefault(other, []).append(at)
    ready, order = [at for at, n in enumerate(waits) if n == 0], []
    while ready:
        order.append(heapq.heappop(ready))
        for reader in readers.get(order[-1], ()):
            waits[reader] -= 1
            if waits[reader] == 0:
                heapq.heappush(ready, reader)
    return order if len(order) == len(needs) else None


def depending(nodes: Iterable[Node], values: Iterable[Value]) -> set[Value]:
    """The values and everything that nodes compute from them."""
    reached = set(values)
    for node in nodes:
        if not reached.isdisjoint(node.inputs):
            reached.update(node.results)
    return reached


def invariant(region: Graph, index: int) -> bool:
    """Whether a loop's body returns carry `index` unchanged."""
    return region.outputs[index] is region.inputs[index]


def narrows(node: Node) -> bool:
    """Whether a node converts floats to a narrower type."""
    if node.op != "convert":
        return False
    wide, narrow = node.inputs[0].dtype, node.result.dtype
    return wide.is_float and narrow.is_float and narrow.bytes < wide.bytes


def carry_offset(node: Node) -> int:
    """How many inputs of a loop come before its carries (the trip count of `loop`)."""
    return 1 if node.op == "loop" else 0


def attr_key(value: Any) -> Any:
    """A hashable key of an attribute that distinguishes what `==` does not: 0.0 and -0.0, 1 and True and 1.0, NaNs, arrays."""
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, float):
        return ("float", struct.pack("<d", value))
    if isinstance(value, (tuple, list)):
        return tuple(attr_key(item) for item in value)
    return (type(value).__name__, value)


def node_key(node: Node, inputs: tuple[Value, ...] | None = None) -> Any:
    """A key for value numbering: equal for nodes without regions that compute the same results from equal `inputs` (default: their own)."""
    attrs = tuple([(name, attr_key(node.attrs[name])) for name in sorted(node.attrs)]) if node.attrs else ()
    return (node.op, node.inputs if inputs is None else inputs, attrs, tuple([r.type for r in node.results]))


def without_results(barrier: Node, results: Container[Value]) -> list[Node]:
    """A barrier that neither takes nor makes some of its results; no node if there are no others."""
    kept = [(value, result) for value, result in zip(barrier.inputs, barrier.results, strict=True) if result not in results]
    if not kept:
        return []
    inputs, others = zip(*kept, strict=True)
    return [replace(barrier, inputs=inputs, results=others)]
