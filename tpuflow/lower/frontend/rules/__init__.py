"""The lowering rules, one module a family; importing this package enters them all in the table."""

from tpuflow.lower.frontend.rules import (
    control,
    convolution,
    elementwise,
    gather,
    linear,
    movement,
    pooling_gradients,
    random,
    reductions,
    scatter,
    special,
    windows,
)

__all__ = [
    "control",
    "convolution",
    "elementwise",
    "gather",
    "linear",
    "movement",
    "pooling_gradients",
    "random",
    "reductions",
    "scatter",
    "special",
    "windows",
]
