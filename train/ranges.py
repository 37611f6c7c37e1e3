"""That the numbers of an object are in their ranges: what options, batches and the like check of themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tpuflow.errors import ConfigError


def dashed(name: str) -> str:
    """A field's option on the command line: --batch-size."""
    return f"--{name.replace('_', '-')}"


def underlined(name: str) -> str:
    """The same where options are spelled as their fields are: --batch_size."""
    return f"--{name}"


def check_least(of: Any, least: Mapping[str, float], spelled: Callable[[str], str] = str) -> None:
    """That no field of `of` is below its bound, nor NaN; one that is None was not given.

    Raises:
      ConfigError: one is, with its name as `spelled` says.
    """
    for name, bound in least.items():
        value = getattr(of, name)
        if value is not None and not value >= bound:
            raise ConfigError(f"{spelled(name)}: expected {bound} or more, got {value}.")


def check_given(of: Any, what: Mapping[str, str], spelled: Callable[[str], str] = str) -> None:
    """That fields which have no default were given.

    Raises:
      ConfigError: one was not, with its name as `spelled` says, and `what` is to be given.
    """
    for name, description in what.items():
        if not getattr(of, name):
            raise ConfigError(f"{spelled(name)}: give {description}.")


def check_positive(of: Any, names: Iterable[str], spelled: Callable[[str], str] = str) -> None:
    """That the fields that count something are 1 or more, if given.

    Raises:
      ConfigError: one is not, with its name as `spelled` says.
    """
    check_least(of, dict.fromkeys(names, 1), spelled)


def check_shares(of: Any, names: Iterable[str], spelled: Callable[[str], str] = str) -> None:
    """That fields are from 0 to 1.

    Raises:
      ConfigError: one is not, with its name as `spelled` says.
    """
    for name in names:
        value = getattr(of, name)
        if not 0 <= value <= 1:
            raise ConfigError(f"{spelled(name)}: expected 0 to 1, got {value}.")
