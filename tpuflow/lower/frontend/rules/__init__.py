"""The lowering rules, one module a family; importing this package enters them all in the table."""

from tpuflow.lower.frontend.rules import (
    control,
    convolution,
    elementwise,
    indexing,
    linear,
    movement,
    random,
    reductions,
    special,
    windows,
)

__all__ = ["control", "convolution", "elementwise", "indexing", "linear", "movement", "random", "reductions", "special", "windows"]
