"""What scripts that are run in processes of their own find out, for the tests that read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FACTS: dict[str, Any] = {}
"""Name of a function that found something out -> what."""


def fact(function: Callable[[], Any]) -> None:
    """Find out now what a function does."""
    FACTS[function.__name__] = function()


def raised(function: Callable[[], Any]) -> str:
    """The error that a function raises, as text."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
