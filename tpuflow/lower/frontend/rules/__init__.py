"""The lowering rules, one module a family; importing this package enters them all in the table."""

from tpuflow.lower.frontend.rules import (
    collectives,
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
    "collectives",
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
