"""Checks of options that more than one public function has."""

from __future__ import annotations

from typing import Any

import numpy as np

from tpuflow.errors import ConfigError, unknown


def check_choice(what: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise a ConfigError, with the nearest name, unless the value is one of those allowed."""
    if value not in allowed:
        raise unknown(what, value, allowed)


def check_number(what: str, value: Any, least: int) -> None:
    """Raise a ConfigError unless the value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(f"{what}: expected a whole number of at least {least}, got {value!r}.")
