"""The table of rewriting rules: operation -> rules, tried in the order of declaration."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tpuflow.lower.passes.rewriter import Rule

RULES: dict[str, list[Rule]] = {}


def rewrites(*ops: str) -> Callable[[Rule], Rule]:
    """Enter a rule for the named operations."""
    return rewrites_all(ops)


def rewrites_all(ops: Iterable[str]) -> Callable[[Rule], Rule]:
    """Enter a rule for every operation of a family."""
    names = sorted(ops)

    def enter(rule: Rule) -> Rule:
        for op in names:
            RULES.setdefault(op, []).append(rule)
        return rule

    return enter
