"""The table of lowering rules of jaxpr primitives, and which of them take random keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tpuflow.lower.importers.registry import Results, Rule, Rules, bound

RULES = Rules()
KEYED: set[str] = set()
"""Primitives whose rules take arrays of random keys in their physical form, u32[..., 2]. Other rules never see keys: the walk runs them on
each of the two words."""


COMPLEX = Rules()
"""The rules of primitives on complex numbers, whose operands and results are `Complex` where the jaxpr's are complex."""
PLANEWISE: set[str] = set()
"""Primitives that act on the real and the imaginary plane separately."""
STRUCTURAL: set[str] = set()
"""Primitives whose rules only pass values on, so that they accept complex and storage-only ones."""
STORED: set[str] = set()
"""Primitives whose rules accept storage-only types; for other rules operands are widened first (`operations.storage`)."""


def lowers(*primitives: str, keys: bool = False) -> Callable[[Callable[..., Results]], Callable[..., Results]]:
    """Enter the decorated function as the rule of the named primitives. Its keyword-only arguments are the parameters it reads."""
    KEYED.update(primitives if keys else ())
    return RULES.lowers(*primitives)


def enter(operations: Mapping[str, Callable[..., Results]], *, keys: bool = False, **arguments: str) -> None:
    """Enter operations as the rules of primitives with the same operands; see `Rules.enter`."""
    KEYED.update(operations if keys else ())
    RULES.enter(operations, **arguments)


__all__ = ["COMPLEX", "KEYED", "PLANEWISE", "RULES", "STORED", "STRUCTURAL", "Rule", "bound", "enter", "lowers"]
