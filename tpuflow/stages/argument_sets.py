"""Some of a function's arguments, by position and by name: the static and the donated ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpuflow.errors import ConfigError, did_you_mean, shown

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class ArgumentSet:
    """Some of a function's arguments, by position and by name."""

    numbers: frozenset[int]
    names: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.numbers or self.names)


def parameters_of(fun: Callable[..., Any]) -> list[str]:
    """The names of a function's positional parameters; none where it has no signature."""
    try:
        return [p.name for p in inspect.signature(fun).parameters.values() if p.kind in _POSITIONAL]
    except (TypeError, ValueError):
        return []


def _set_of(kind: type, option: str, given: Any, wanted: str) -> set[Any]:
    """What is given as one, several, or None of a kind.

    Raises:
      ConfigError: it is something else.
    """
    one = isinstance(given, kind) and not isinstance(given, bool)
    several = () if given is None else (given,) if one else tuple(given) if isinstance(given, Iterable) else (given,)
    if isinstance(given, Mapping) or not all(isinstance(item, kind) and not isinstance(item, bool) for item in several):
        raise ConfigError(f"tpuflow.jit: {option}: expected {wanted}, got {shown(given)}.")
    return set(several)


def argument_set(fun: Callable[..., Any], what: str, numbers: int | Sequence[int], names: str | Iterable[str]) -> ArgumentSet:
    """Positions and names completed from each other by the function's signature, as jax.jit does.

    Raises:
      ConfigError: the function has no such argument.
    """
    places = _set_of(int, f"{what}_argnums", numbers, "positions: an int or a sequence of ints")
    words = _set_of(str, f"{what}_argnames", names, "names: a str or a sequence of strs")
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return ArgumentSet(frozenset(places), frozenset(words))
    positional = [p.name for p in parameters if p.kind in _POSITIONAL]
    open_ended = {p.kind for p in parameters}
    if inspect.Parameter.VAR_POSITIONAL not in open_ended:
        for n in places:
            if not -len(positional) <= n < len(positional):
                raise ConfigError(
                    f"tpuflow.jit: {what}_argnums has {n}, but {getattr(fun, '__name__', fun)} takes {len(positional)} positional "
                    f"arguments: {', '.join(positional)}. Count them from 0, or name them in {what}_argnames."
                )
    known = {p.name for p in parameters}
    if (unknown := words - known) and inspect.Parameter.VAR_KEYWORD not in open_ended:
        near = did_you_mean(min(unknown), known)
        raise ConfigError(
            f"tpuflow.jit: {what}_argnames has {sorted(unknown)}, but the arguments are {sorted(known)}.{near} Name arguments of the "
            "function."
        )
    by_position = {positional[n] for n in places if -len(positional) <= n < len(positional)}
    by_name = {i for i, name in enumerate(positional) if name in words}
    return ArgumentSet(frozenset(places | by_name), frozenset(words | by_position))
