"""Advice in error messages about labels that do not fit a loss: a table with one row for each kind of mismatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tpuflow.errors import a_thing

Shape = tuple[int, ...]

_ONE_HOT = "They look like one-hot labels: give class numbers, np.argmax(labels, axis=-1)"
_FOR_CLASSES: tuple[tuple[Callable[[Shape, Shape, str], bool], str], ...] = (
    (lambda outputs, labels, kind: labels == outputs and kind in "iub", f"{_ONE_HOT}."),
    (
        lambda outputs, labels, kind: labels == outputs,
        f"{_ONE_HOT}, or loss=optax.softmax_cross_entropy, which takes them as they are.",
    ),
    (lambda outputs, labels, kind: labels == (*outputs[:-1], 1), "Drop their last axis: labels[..., 0]."),
    (lambda outputs, labels, kind: labels == outputs[:-1] and kind == "b", "Give class numbers: labels.astype(np.int32)."),
    (
        lambda outputs, labels, kind: labels == outputs[:-1],
        "If they are class numbers, give them as integers: labels.astype(np.int32); for real numbers, choose loss='mse'.",
    ),
)
_FOR_NUMBERS: tuple[tuple[Callable[[Shape, Shape, str], bool], str], ...] = (
    (
        lambda outputs, labels, kind: labels == outputs[:-1] and outputs[-1] == 1,
        "Give them the outputs' last axis, labels[..., None], or let the model drop its own, outputs[..., 0].",
    ),
    (lambda outputs, labels, kind: labels == outputs[:-1] and kind in "iu", "For class numbers, choose loss='softmax_cross_entropy'."),
    (
        lambda outputs, labels, kind: labels == outputs[:-1],
        "If they are class numbers, give them as integers, labels.astype(np.int32), and choose loss='softmax_cross_entropy'.",
    ),
)


def types_text(tree: Any) -> str:
    """The types and shapes of a tree's arrays, such as "float32[8, 3], int32[8]"."""
    return ", ".join(map(a_thing, jax.tree.leaves(tree))) or "nothing"


def remedy(outputs: Any, labels: Any, *, classes: bool) -> str:
    """What to do if labels do not fit the outputs under a loss of class numbers or of real numbers."""
    kind = np.dtype(labels.dtype).kind
    for fits, text in _FOR_CLASSES if classes else _FOR_NUMBERS:
        if fits(tuple(outputs.shape), tuple(labels.shape), kind):
            return text
    return "Change the labels or the model's last layer, or give a loss of your own: a function (outputs, labels) -> loss."


def one_class(outputs: Any) -> str:
    """What to do about a loss over the classes of a model with one output."""
    return (
        "The softmax of one class is always 1, so its loss is always 0: give the model an output for each class; or, for two classes, "
        f"choose loss='sigmoid_cross_entropy' and labels of the outputs' shape {list(outputs.shape)}, labels[..., None]."
    )


def out_of_range(labels: np.ndarray, classes: int) -> str:
    """What to do about labels that are no numbers of so many classes."""
    least, most = int(labels.min()), int(labels.max())
    if least == 1 and most == classes:
        return "They seem to count from 1: give labels - 1."
    if least < 0:
        return "Leave such samples out, or give a loss of your own that does not count them."
    return f"Give the model at least {most + 1} outputs, or other labels."
