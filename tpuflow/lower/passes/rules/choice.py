"""The rule for nested selects by one condition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.graph.ops import ELEMENTWISE
from tpuflow.lower.passes.rewriter import Rewriter
from tpuflow.lower.passes.rules.table import rewrites

DEEPEST = 8  # limit of nodes between the two selects


@rewrites("select")
def _chosen_already(rw: Rewriter, node: Node) -> Value | None:
    """select(p, a, f(select(p, b, x))) is select(p, a, f(x)) for one condition p, however f mixes elements, if f(x) is there anyway.

    A norm with a gradient at zero is written so: the norm of x, and where that is not zero, that of x with its zeros replaced.
    """
    condition, on_true, on_false = node.inputs
    if condition.shape:
        return None
    chosen = _given(rw, condition, holds=True)(on_true), _given(rw, condition, holds=False)(on_false)
    if chosen == (on_true, on_false):
        return None
    return rw.emit("select", (condition, *chosen), node.result.type)


def _given(rw: Rewriter, condition: Value, *, holds: bool) -> Callable[[Value], Value]:
    """A function that simplifies values, assuming that a 0-d condition holds or not, to existing values or new 0-d nodes."""
    known: dict[Value, Value] = {}

    def visit(value: Value, depth: int = 0) -> Value:
        if value not in known:
            known[value] = value
            node = rw.maker(value)
            if node is not None and not node.regions and len(node.results) == 1 and depth < DEEPEST:
                known[value] = choose(node, depth)
        return known[value]

    def choose(node: Node, depth: int) -> Value:
        if node.op == "select" and _is_everywhere(rw, node.inputs[0], condition):
            return node.inputs[1 if holds else 2]
        inputs = tuple(visit(v, depth + 1) for v in node.inputs)
        if inputs == node.inputs:
            return node.result
        equal = rw.equal(replace(node, inputs=inputs))
        if equal is not None:
            return equal[0]
        cheap = node.op in ELEMENTWISE and not node.result.shape
        return rw.emit(node.op, inputs, node.result.type, **node.attrs) if cheap else node.result

    return visit


def _is_everywhere(rw: Rewriter, value: Value, number: Value) -> bool:
    """Whether a value is `number`, or its broadcast."""
    spread = rw.maker(value, "broadcast")
    return value is number or (spread is not None and spread.inputs[0] is number)
