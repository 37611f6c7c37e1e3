"""The losses of trainings that begin alike, beside plain jax.jit's and PyTorch's: how far apart they are, and how far they may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

JIT, TORCH, EXACT = "jax.jit", "PyTorch", "fp32"
JIT_BOUND = 1e-5
"""Relative difference of any loss in fp32 from plain jax.jit's."""


def differences(losses: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Pair such as "fp32 - PyTorch" -> the "largest" relative difference, and "at_step" which; losses by names, jax.jit's among them."""
    pairs = [(one, other) for other in (JIT, TORCH) if other in losses for one in losses if one not in (other, TORCH)]
    return {f"{one} - {other}": _apart(losses[one], losses[other]) for one, other in pairs}


def bounds_failed(apart: Mapping[str, Mapping[str, float]], torch_bound: float) -> int:
    """How many bounds of losses in fp32 do not hold: `JIT_BOUND` beside jax.jit's, and one beside PyTorch's; NaN never holds."""
    bounds = {f"{EXACT} - {JIT}": JIT_BOUND, f"{EXACT} - {TORCH}": torch_bound}
    return sum(not apart[pair]["largest"] <= bound for pair, bound in bounds.items() if pair in apart)


def bounds_in_words(torch_bound: float) -> str:
    """For the end of a table."""
    return f"{EXACT} losses {JIT_BOUND:g} from {JIT}, {torch_bound:g} from {TORCH}"


def in_words(pair: str, row: Mapping[str, float]) -> str:
    """A line of a table."""
    return f"{pair:20} losses {row['largest']:.1e} apart (relative, step {row['at_step']:.0f})"


def _apart(one: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    apart = np.abs(np.divide(one, other) - 1)
    return {"largest": float(apart.max()), "at_step": int(apart.argmax()) + 1}
