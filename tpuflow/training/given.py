"""What was given in place of a model or an optimizer, in words, with what to do about it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import optax

from tpuflow import amp
from tpuflow.errors import ConfigError, shown

DEFAULT_OPTIMIZER = "adam(1e-3)"
"""What `tpuflow.train` takes where none is given."""


def check_optimizer(given: Any) -> None:
    """That it is an Optax transformation.

    Raises:
      ConfigError: it is something else.
    """
    if not callable(getattr(given, "update", None)) or isinstance(given, (type, Mapping)):
        raise ConfigError(f"optimizer: expected an Optax transformation such as optax.sgd(1e-3), got {_optimizer_in_words(given)}.")


def _optimizer_in_words(given: Any) -> str:
    if isinstance(given, str) and inspect.isfunction(getattr(optax, given, None)):
        return f"the string {given!r}; give optax.{given}(...), with a learning rate"
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return f"the number {given!r}; for a learning rate, give optax.sgd({given!r}) or another optimizer with it"
    if inspect.isfunction(given) and "<locals>" in given.__qualname__:
        return f"the function {given.__qualname__}; give a schedule to an optimizer, such as optax.sgd(schedule)"
    if inspect.isfunction(given):
        return f"the function {given.__name__} itself; call it, such as optax.{given.__name__}(1e-3)"
    if made_by("torch", given):
        return f"the PyTorch optimizer {type(given).__name__}; use the one of Optax, such as optax.{type(given).__name__.lower()}(1e-3)"
    if isinstance(given, tuple):
        return "a tuple, such as the state that an optimizer's init gives; pass the optimizer itself"
    return f"{shown(given)}; build one with optax"


def model_in_words(given: Any) -> str:
    """What was given in place of a Flax module, and what to do."""
    if isinstance(given, type):
        return f"the class {given.__name__}; pass an instance, {given.__name__}(...)"
    if isinstance(given, Mapping):
        return "a dict; parameters are given beside the module, with params="
    if made_by("torch", given):
        return f"the PyTorch module {type(given).__name__}; write it in Flax, its weights can be read with tpuflow.load_params"
    return f"a {type(given).__name__}; put what it computes into the __call__ of a flax.linen.Module"


def made_by(package: str, given: Any) -> bool:
    """Whether its class, or one that it is derived from, is that of a package, which need not be installed."""
    return any(base.__module__.partition(".")[0] == package for base in type(given).__mro__)


def optimizer_words(state: Any) -> str:
    """What reports call an optimizer by its state: the transformations that keep one, as Optax names the functions which make them
    ("scale_by_adam, scale_by_schedule"); "stateless" if none does, as in plain SGD."""
    return ", ".join(dict.fromkeys(_kept(amp.optimizer_state(state)))) or "stateless"


def _kept(state: Any) -> Iterator[str]:
    """Names out of the types of Optax's states, which are named tuples: ScaleByAdamState is of scale_by_adam."""
    if isinstance(state, Mapping):  # the groups of a partitioned optimizer
        yield from (name for part in state.values() for name in _kept(part))
    if isinstance(state, tuple) and type(state) is tuple:
        yield from (name for part in state for name in _kept(part))
    named = type(state).__name__
    if isinstance(state, tuple) and named.endswith("State") and named != "EmptyState":
        yield re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", named.removesuffix("State")).lower()
        yield from (name for field in ("inner_state", "inner_states") for name in _kept(getattr(state, field, ())))
