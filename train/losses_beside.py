"""The losses of trainings that begin alike, beside plain jax.jit's and PyTorch's: how far apart they are, and how far they may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

JIT, TORCH, EXACT = "jax.jit", "PyTorch", "fp32"
JIT_BOUND = 1e-5
"""Relative difference of any loss in fp32 from plain jax.jit's."""

TORCH_RATIO = 1.1
"""How much farther from PyTorch's the losses in fp32 may be than jax.jit's are: its kernels sum in another order, and what that rounds
AdamW magnifies at every step, where gradients are near zero."""

BOUNDS = f"of {EXACT}: losses {JIT_BOUND:g} from {JIT}'s; as near to {TORCH}'s as {JIT}'s are, times {TORCH_RATIO:g}"


def differences(losses: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Pair such as "fp32 - PyTorch" -> the "largest" relative difference, and "at_step" which; losses by names, jax.jit's among them."""
    pairs = [(one, other) for other in (JIT, TORCH) if other in losses for one in losses if one not in (other, TORCH)]
    return {f"{one} - {other}": _apart(losses[one], losses[other]) for one, other in pairs}


def bounds_failed(apart: Mapping[str, Mapping[str, float]]) -> int:
    """How many bounds of `BOUNDS` do not hold; not a number never holds."""
    allowed = {JIT: JIT_BOUND}
    if (theirs := apart.get(f"{JIT} - {TORCH}")) is not None:
        allowed[TORCH] = TORCH_RATIO * theirs["largest"] + JIT_BOUND
    return sum(not apart[f"{EXACT} - {other}"]["largest"] <= bound for other, bound in allowed.items() if f"{EXACT} - {other}" in apart)


def in_words(pair: str, row: Mapping[str, float]) -> str:
    """A line of a table."""
    return f"{pair:20} losses {row['largest']:.1e} apart (relative, step {row['at_step']:.0f})"


def _apart(one: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    apart = np.abs(np.divide(one, other) - 1)
    return {"largest": float(apart.max()), "at_step": int(apart.argmax()) + 1}
