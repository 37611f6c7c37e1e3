"""The lowering rules, one module a family; importing this package enters them all in the table."""

from tpuflow.lower.importers.stablehlo.rules import (
    collectives,
    complex,
    control,
    custom,
    elementwise,
    indexing,
    linalg,
    movement,
    products,
    reductions,
)

__all__ = ["collectives", "complex", "control", "custom", "elementwise", "indexing", "linalg", "movement", "products", "reductions"]
