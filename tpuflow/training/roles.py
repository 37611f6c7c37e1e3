"""The roles of a batch's parts: which are the model's inputs, and which the loss and the metrics get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tpuflow.data.batching import LABEL_NAMES, PAIR
from tpuflow.errors import ConfigError, DataError, shown
from tpuflow.training.adapters.model import Inputs

InputSelection = str | int | Sequence[str | int] | Callable[[Any], Any] | None


@dataclass(frozen=True, slots=True)
class Roles:
    """Functions that take their parts out of a batch, for batches of one structure: pairs (inputs, targets), mappings, or any other tree.

    inputs: batch -> the arguments of the model's call.
    labels: batch -> the one array that losses and metrics with a name compare outputs with; None if there is no such part.
    targets: batch -> what losses and metrics of the user's own get: the second of a pair, else the whole batch.
    given: the option `inputs`.
    """

    inputs: Callable[[Any], Inputs]
    labels: Callable[[Any], Any] | None
    targets: Callable[[Any], Any]
    given: InputSelection = None


def get_roles(batch: Any, given: InputSelection, parameters: Sequence[str], what: str = "data") -> Roles:
    """The roles in batches like this one.

    given: the entries of a batch that the model gets, as positional arguments; or a function of the batch that gives them (a mapping:
      keyword arguments). None: the first of a pair (if that is a tuple, its parts; if it is a mapping of names of
      the call's arguments, these); of a mapping, the entries named like the arguments of
      the model's call (`parameters`), or the only one beside a label; of anything else, all of it.

    Raises:
      ConfigError: the batch has no such entry.
      DataError: which entries are the model's cannot be told.
    """
    pair = isinstance(batch, tuple) and len(batch) == len(PAIR)
    label = _label_of(batch)
    targets = (lambda b: b[1]) if pair else (lambda b: b)
    labels = None if label is None else (lambda b: b[label])
    return Roles(_inputs(batch, given, parameters, what, pair=pair), labels, targets, given)


def _label_of(batch: Any) -> Any:
    """The key of the labels: those of a pair, or the only entry of a mapping that is named like one; None if there are none."""
    if isinstance(batch, Mapping):
        found = [name for name in batch if name in LABEL_NAMES]
        return found[0] if len(found) == 1 and hasattr(batch[found[0]], "shape") else None
    return 1 if isinstance(batch, tuple) and len(batch) == len(PAIR) and hasattr(batch[1], "shape") else None


def _inputs(batch: Any, given: InputSelection, parameters: Sequence[str], what: str, *, pair: bool) -> Callable[[Any], Inputs]:
    if given is not None:
        return _given_inputs(batch, given)
    if pair and isinstance(batch[0], Mapping) and not set(batch[0]) <= set(parameters):
        return lambda b: ((b[0],), {})
    if pair:
        return lambda b: _arguments(b[0])
    if isinstance(batch, Mapping):
        return _named_inputs(batch, parameters, what)
    if isinstance(batch, tuple):
        raise DataError(
            f"{what}: a batch must be a pair (inputs, labels), got {len(batch)} parts. Say which of them the model gets, for example "
            "inputs=0, and give a loss(outputs, batch) of your own."
        )
    return lambda b: ((b,), {})


def _given_inputs(batch: Any, given: Any) -> Callable[[Any], Inputs]:
    if callable(given):
        return lambda b: _arguments(_called(given, b))
    if not isinstance(given, (str, int, list, tuple)) or given in ([], ()):
        raise ConfigError(f"inputs: expected names or places of a batch's entries, or a function of the batch, got {shown(given)}.")
    names = [given] if isinstance(given, (str, int)) else list(given)
    known = list(batch) if isinstance(batch, Mapping) else list(range(len(batch))) if isinstance(batch, tuple) else []
    for name in names:
        if name not in known:
            raise ConfigError(f"inputs: a batch has no entry {name!r}; it has {', '.join(map(repr, known)) or 'no entries'}.")
    return lambda b: (tuple(b[name] for name in names), {})


def _called(given: Callable[[Any], Any], batch: Any) -> Any:
    """The result of the user's function for a batch; for a batch of shapes, the shapes of the result."""
    only_shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch))
    return jax.eval_shape(given, batch) if only_shapes else given(batch)


def _named_inputs(batch: Mapping[str, Any], parameters: Sequence[str], what: str) -> Callable[[Any], Inputs]:
    names = [name for name in batch if name in parameters]
    if names:
        return lambda b: ((), {name: b[name] for name in names})
    others = [name for name in batch if name not in LABEL_NAMES]
    if len(others) == 1:
        return lambda b: ((b[others[0]],), {})
    takes, example = ", ".join(parameters) or "arguments without names", others[:1] or list(batch)[:1]
    raise DataError(
        f"{what}: which entries of a batch the model gets cannot be told: it has {', '.join(map(str, batch))}, not one beside a label; "
        f"the model's call takes {takes}. Say it, for example inputs={example}."
    )


def _arguments(part: Any) -> Inputs:
    if isinstance(part, Mapping):
        return (), part
    return (part, {}) if isinstance(part, tuple) else ((part,), {})
