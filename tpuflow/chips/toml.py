"""Rows of facts in TOML files of the user's: read, and checked field by field against a dataclass."""

from __future__ import annotations

import dataclasses
import math
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from tpuflow.errors import ConfigError, did_you_mean

Row = TypeVar("Row")


def read_toml(path: Path, what: str, fields_of: str) -> dict[str, Any]:
    """The top level of a TOML file; `what` it should be and whose fields it should have are for the error.

    Raises:
      ConfigError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{what} file {str(path)!r}: {error}. Give a readable TOML file with the fields of {fields_of}.") from error


def from_mapping(kind: type[Row], row: Mapping[str, Any], where: str, what: str, *, unknown: str = "", missing: str = "") -> Row:
    """A row of a dataclass whose fields are strings and numbers that are not negative.

    `where` names the row's place in errors and `what` the thing it describes; `unknown` and `missing` say what to do about such fields.

    Raises:
      ConfigError: a field is unknown, missing, of another type, or not a possible number.
    """
    types = typing.get_type_hints(kind)
    required = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}  # type: ignore[arg-type]
    for name in row:
        if name not in types:
            near = did_you_mean(name, types)
            raise ConfigError(f"{where}: a {what} has no field {name!r}.{near} Its fields: {', '.join(types)}. {unknown}".rstrip())
    if lacking := sorted(required - set(row)):
        raise ConfigError(f"{where}: the {what} lacks {', '.join(lacking)}. {missing}".rstrip())
    values = {name: _checked(value, types[name], f"{where}: {name}") for name, value in row.items()}
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _checked(value: Any, kind: type, what: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ConfigError(f"{what} is {value!r}; expected {'a string' if kind is str else 'a number' if kind is float else 'an integer'}.")
    if kind is not str and not 0 <= value < math.inf:
        raise ConfigError(f"{what} is {value!r}; expected a finite number that is not negative.")
    return value
