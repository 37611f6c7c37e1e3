"""The lowering rules, one module a family; importing this package enters them all in the table."""

from tpuflow.lower.importers.jaxpr.rules import (
    collectives,
    complex,
    control,
    elementwise,
    exported,
    indexing,
    linalg,
    movement,
    products,
    random,
    reductions,
)

__all__ = [
    "collectives", "complex", "control", "elementwise", "exported", "indexing", "linalg", "movement", "products", "random", "reductions",
]  # fmt: skip
