"""Rules for control flow: branches already chosen, loops that do not run, results that only pass through."""

from __future__ import annotations

from tpuflow.lower.graph.graph import Node, Value
from tpuflow.lower.passes.analysis import carry_offset, invariant
from tpuflow.lower.passes.rewriter import Rewriter, Values
from tpuflow.lower.passes.rules.table import rewrites


@rewrites("switch")
def _known_branch(rw: Rewriter, node: Node) -> Values | None:
    """A switch on a known index, or with one branch, is that branch."""
    known = rw.splat(node.inputs[0])
    if known is None and len(node.regions) > 1:
        return None
    branch = node.regions[min(max(int(known or 0), 0), len(node.regions) - 1)]
    return rw.inline(branch, node.inputs[1:])


@rewrites("loop")
def _known_trips(rw: Rewriter, node: Node) -> Values | None:
    """A loop of no trips is its carries; a loop of one trip is its body, inlined."""
    known = rw.splat(node.inputs[0])
    if known is None or known > 1:
        return None
    return rw.inline(node.regions[0], node.inputs[1:]) if known == 1 else node.inputs[1:]


@rewrites("loop", "while")
def _invariant_results(rw: Rewriter, node: Node) -> Values | None:
    """The result of a loop-invariant carry is the carry's operand."""
    body, carries = node.regions[-1], node.inputs[carry_offset(node) :]
    passed: list[Value] = [
        carry if invariant(body, i) else result for i, (carry, result) in enumerate(zip(carries, node.results, strict=True))
    ]
    return _with_results(rw, node, passed)


@rewrites("switch")
def _invariant_branches(rw: Rewriter, node: Node) -> Values | None:
    """A result that is the same operand in every branch is that operand."""
    passed = list(node.results)
    for i in range(len(passed)):
        places = {branch.inputs.index(branch.outputs[i]) if branch.outputs[i] in branch.inputs else -1 for branch in node.regions}
        if len(places) == 1 and -1 not in places:
            passed[i] = node.inputs[1 + places.pop()]
    return _with_results(rw, node, passed)


def _with_results(rw: Rewriter, node: Node, passed: list[Value]) -> Values | None:
    """The node kept for its other results, which rules have seen; None if all results stay (the rule does not apply again)."""
    if tuple(passed) == node.results:
        return None
    rw.keep(node)
    return tuple(passed)
