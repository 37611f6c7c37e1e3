"""Checks of options that more than one public function has."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from tpuflow.errors import ConfigError, shown, unknown


def check_choice(what: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise a ConfigError, with the nearest name, unless the value is one of those allowed."""
    if not isinstance(value, str) or value not in allowed:
        raise unknown(what, value, allowed)


def check_number(what: str, value: Any, least: int) -> None:
    """Raise a ConfigError unless the value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(f"{what}: expected a whole number of at least {least}, got {shown(value)}.")


def check_real(what: str, value: Any, wanted: str, least: float = -math.inf, most: float = math.inf) -> None:
    """Raise a ConfigError unless the value is a finite number from `least` to `most`; `wanted` says so in words."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not least <= value <= most:
        raise ConfigError(f"{what}: expected {wanted}, got {shown(value)}.")


def check_switch(what: str, value: Any) -> None:
    """Raise a ConfigError unless the value is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ConfigError(f"{what}: expected True or False, got {shown(value)}.")


def check_text(what: str, value: Any) -> None:
    """Raise a ConfigError unless the value is a string."""
    if not isinstance(value, str):
        raise ConfigError(f"{what}: expected a name, got {shown(value)}.")


def check_path(what: str, value: Any) -> None:
    """Raise a ConfigError unless the value is a path, as a string or an `os.PathLike`."""
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{what}: expected a path, got {shown(value)}.")


def check_callable(what: str, value: Any, signature: str) -> None:
    """Raise a ConfigError unless the value can be called; `signature` says how it is going to be."""
    if not callable(value):
        raise ConfigError(f"{what}: expected a function {signature}, got {shown(value)}.")
