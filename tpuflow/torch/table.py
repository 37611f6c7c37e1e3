"""The table of ATen operations: the name of an overload -> the function of JAX arrays that means the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpuflow.errors import ConfigError, shown

Row = Callable[..., Any]

ROWS: dict[str, Row] = {}
"""By "namespace.operation.overload", as PyTorch prints it. A row takes the overload's own arguments: tensors as JAX arrays, 64-bit integers
among them as 32-bit ones; element types as NumPy's; devices, layouts and memory formats are left out. The result gets the element type
that PyTorch says it has."""
RANDOM: set[str] = set()
"""The rows that draw random numbers; they get a key first."""


def lowers(*names: str, random: bool = False) -> Callable[[Row], Row]:
    """A decorator: the function of JAX arrays implements these ATen operations, such as "aten.relu.default", or a library's own operators.

    random: the function takes a random key before its other arguments; every node of a graph gets a different key.

    Raises:
      ConfigError: a name is not of this form.
    """
    for name in names:
        if not isinstance(name, str) or name.count(".") != 2:
            raise ConfigError(f"lowers: expected names like 'aten.relu.default' (namespace, operation, overload), got {shown(name)}.")

    def enter(row: Row) -> Row:
        ROWS.update(dict.fromkeys(names, row))
        if random:
            RANDOM.update(names)
        return row

    return enter
