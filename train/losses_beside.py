"""The losses of trainings that begin alike, beside plain jax.jit's and PyTorch's: how far apart they are, and how far they may be."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tpuflow.training.plotting import matplotlib_figures, save_figure

JIT, TORCH, EXACT = "jax.jit", "PyTorch", "fp32"
JIT_BOUND = 1e-5
"""Relative difference of any loss in fp32 from plain jax.jit's."""

SHORT_JIT_BOUND = 1e-3
"""The same in a 16-bit policy from that of the same step under jax.jit: two roundings of a loss to fp16."""


def differences(losses: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Pair such as "fp32 - PyTorch" -> the "largest" relative difference, and "at_step" which; losses by names, jax.jit's among them.

    What jax.jit makes of the step of a 16-bit policy is named by `in_policy`, and stands beside that policy's.
    """
    pairs = [(one, other) for other in (JIT, TORCH) if other in losses for one in losses if one not in (other, TORCH)]
    pairs += [(policy, in_policy(policy)) for policy in losses if in_policy(policy) in losses]
    return {f"{one} - {other}": _apart(losses[one], losses[other]) for one, other in pairs}


def in_policy(policy: str) -> str:
    """The name of jax.jit's run of a policy's step."""
    return f"{JIT} {policy}"


def bounds_failed(apart: Mapping[str, Mapping[str, float]], torch_bound: float) -> int:
    """How many bounds of losses do not hold: in fp32 `JIT_BOUND` beside jax.jit's and one beside PyTorch's, in a 16-bit policy
    `SHORT_JIT_BOUND` beside jax.jit's of that policy; NaN never holds."""
    bounds = {pair: SHORT_JIT_BOUND for pair in apart for one, other in [pair.split(" - ")] if other == in_policy(one)}
    bounds |= {f"{EXACT} - {JIT}": JIT_BOUND, f"{EXACT} - {TORCH}": torch_bound}
    return sum(not apart[pair]["largest"] <= bound for pair, bound in bounds.items() if pair in apart)


def bounds_in_words(torch_bound: float) -> str:
    """For the end of a table."""
    exact = f"{EXACT} losses {JIT_BOUND:g} from {JIT}, {torch_bound:g} from {TORCH}"
    return f"{exact}; 16-bit losses {SHORT_JIT_BOUND:g} from {JIT} of the same policy"


def in_words(pair: str, row: Mapping[str, float]) -> str:
    """A line of a table."""
    return f"{pair:23} losses {row['largest']:.1e} apart (relative, step {row['at_step']:.0f})"


def draw(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], path: Path, **texts: str) -> None:
    """Losses over updates by their labels in one picture, with texts as Matplotlib's axes take them: .png, .svg or .pdf."""
    figure = matplotlib_figures().Figure(figsize=(8.0, 4.5), layout="constrained")
    axis = figure.subplots()
    for (label, (updates, losses)), style in zip(curves.items(), itertools.cycle(("-", "--", "-.", ":")), strict=False):
        axis.plot(updates, losses, style, label=label)
    axis.set(**texts)
    axis.legend()
    save_figure(figure, path)


def _apart(one: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    apart = np.abs(np.divide(one, other) - 1)
    return {"largest": float(apart.max()), "at_step": int(apart.argmax()) + 1}
