"""Optimizers and models in words: an optimizer's name for reports, and for error messages what a wrong argument is and what to pass."""

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
    """Check the option `optimizer`.

    Raises:
      ConfigError: it is no Optax transformation.
    """
    if not callable(getattr(given, "update", None)) or isinstance(given, (type, Mapping)):
        raise ConfigError(f"optimizer: expected an Optax transformation such as optax.sgd(1e-3), got {_describe_wrong_optimizer(given)}.")


def _describe_wrong_optimizer(given: Any) -> str:
    if isinstance(given, str) and inspect.isfunction(getattr(optax, given, None)):
        return f"the string {given!r}; give optax.{given}(...), with a learning rate"
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return f"the number {given!r}; for a learning rate, give optax.sgd({given!r}) or another optimizer with it"
    if inspect.isfunction(given) and "<locals>" in given.__qualname__:
        return f"the function {given.__qualname__}; give a schedule to an optimizer, such as optax.sgd(schedule)"
    if inspect.isfunction(given):
        return f"the function {given.__name__} itself; call it, such as optax.{given.__name__}(1e-3)"
    if is_from_package("torch", given):
        return f"the PyTorch optimizer {type(given).__name__}; use the one of Optax, such as optax.{type(given).__name__.lower()}(1e-3)"
    if isinstance(given, tuple):
        return "a tuple, such as the state that an optimizer's init gives; pass the optimizer itself"
    return f"{shown(given)}; build one with optax"


def describe_wrong_model(given: Any) -> str:
    """What a value that is no model is instead, and what to pass."""
    if isinstance(given, type):
        return f"the class {given.__name__}; pass an instance, {given.__name__}(...)"
    if isinstance(given, Mapping):
        return "a dict; parameters are given beside the module, with params="
    if is_from_package("torch", given):
        return f"the PyTorch module {type(given).__name__}; write it in Flax, its weights can be read with tpuflow.load_params"
    return f"a {type(given).__name__}; put what it computes into the __call__ of a flax.linen.Module"


def is_from_package(package: str, given: Any) -> bool:
    """Whether a value's class or one of its base classes is defined in a package, which need not be installed."""
    return any(base.__module__.partition(".")[0] == package for base in type(given).__mro__)


def describe_optimizer(state: Any) -> str:
    """An optimizer's name in reports, from its state: the Optax transformations in it that have a state ("scale_by_adam,
    scale_by_schedule"); "stateless" if none has, as in plain SGD."""
    return ", ".join(dict.fromkeys(_kept(amp.optimizer_state(state)))) or "stateless"


def _kept(state: Any) -> Iterator[str]:
    """The transformations' names, from the class names of their states: ScaleByAdamState is the state of scale_by_adam."""
    if isinstance(state, Mapping):  # the groups of a partitioned optimizer
        yield from (name for part in state.values() for name in _kept(part))
    if isinstance(state, tuple) and type(state) is tuple:
        yield from (name for part in state for name in _kept(part))
    named = type(state).__name__
    if isinstance(state, tuple) and named.endswith("State") and named != "EmptyState":
        yield re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", named.removesuffix("State")).lower()
        yield from (name for field in ("inner_state", "inner_states") for name in _kept(getattr(state, field, ())))
