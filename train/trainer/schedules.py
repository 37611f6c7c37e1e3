"""How the rate goes after the warm-up, as transformers' `get_scheduler` has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Shape = Callable[[np.ndarray, int, int], np.ndarray]


def _falling(steps: np.ndarray, warmup: int, total: int) -> np.ndarray:
    """The share of the way that is left after the warm-up."""
    return np.maximum(0.0, (total - steps) / max(1, total - warmup))


SCHEDULERS: Mapping[str, Shape] = {
    "linear": _falling,
    "cosine": lambda steps, warmup, total: 0.5 * (1.0 + np.cos(np.pi * np.minimum(1.0, 1.0 - _falling(steps, warmup, total)))),
    "constant": lambda steps, warmup, total: np.ones_like(steps),
    "constant_with_warmup": lambda steps, warmup, total: np.ones_like(steps),
    "inverse_sqrt": lambda steps, warmup, total: 1.0 / np.sqrt((steps + ((shift := warmup or 10_000) - warmup)).clip(1.0) / shift),
}
"""Name -> the share of the highest rate at each update from the warm-up on, as transformers' `get_scheduler` has them."""
