"""The kinds of kernels: what a `fused` node's region is made of, from which its verification, its template and its cost follow."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


class Kind(enum.StrEnum):
    """A kind of kernel. Each has its rule in `graph/verify.py` and its template in `emit/templates.py`, or importing these fails."""

    MAP = "map"
    """Elementwise work over one iteration space."""
    REDUCE = "reduce"
    """Elementwise work, reductions of it over the same axes, and elementwise work on their results."""
    DOT = "dot"
    """A product, elementwise work on its results, and their sums over its rows."""
    ROWS = "rows"
    """Reductions along rows, what is made of rows and of these, and products that make or take rows."""
    SEVERAL = "several"
    """Small kernels that depend on one another in nothing and run together."""


def for_all(table: Mapping[Kind, T], where: str) -> Mapping[Kind, T]:
    """A table, once it is known to have a row for every kind."""
    missing = [kind for kind in Kind if kind not in table]
    assert not missing, f"{where} has no row for kernels of kind {', '.join(missing)}"
    return table
