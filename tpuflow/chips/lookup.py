"""`get_chip`: a row by name, by TOML file, or as it is."""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpuflow.chips.catalog import CHIPS
from tpuflow.chips.chip import Chip
from tpuflow.errors import ConfigError, did_you_mean, unknown

BASE = "base"


def get_chip(chip: str | Path | Chip) -> Chip:
    """The row of a chip: a name of the catalogue, a .toml file with a row of one's own, or a `Chip`, which is returned as it is.

    A TOML file holds the fields of `Chip` at its top level; with `base = "tpu-v4"` it needs only those that differ from that row.

    Raises:
      ConfigError: no chip has that name; the file cannot be read, or a field is unknown, missing, or of another type.
    """
    if isinstance(chip, Chip):
        return chip
    if str(chip).endswith(".toml"):
        return _from_toml(Path(chip))
    if chip in CHIPS:
        return CHIPS[str(chip)]
    raise unknown("chip", str(chip), sorted(CHIPS), "a .toml file or a tpuflow.Chip of your own")


def _from_toml(path: Path) -> Chip:
    try:
        row = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"chip file {str(path)!r}: {error}. Give a readable TOML file with the fields of tpuflow.Chip.") from error
    base = row.pop(BASE, None)
    start = {} if base is None else dataclasses.asdict(get_chip(base))
    return from_mapping({**start, "name": path.stem, "source": f"{path.name}{f', on {base}' if base else ''}", **row}, str(path))


def from_mapping(row: Mapping[str, Any], where: str) -> Chip:
    """A chip of the given fields; `where` names their place in errors.

    Raises:
      ConfigError: a field is unknown, missing, of another type, or not a possible number.
    """
    hints = typing.get_type_hints(Chip)
    required = {f.name for f in dataclasses.fields(Chip) if f.default is dataclasses.MISSING}
    for name in row:
        if name not in hints:
            raise ConfigError(f"{where}: a chip has no field {name!r}.{did_you_mean(name, hints)} Its fields: {', '.join(hints)}.")
    if missing := sorted(required - set(row)):
        raise ConfigError(f'{where}: the chip lacks {", ".join(missing)}; give them, or a row to start from: {BASE} = "generic".')
    return Chip(**{name: _checked(value, hints[name], f"{where}: {name}") for name, value in row.items()})


def _checked(value: Any, kind: type, what: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ConfigError(f"{what} is {value!r}; expected {'a string' if kind is str else 'a number' if kind is float else 'an integer'}.")
    if kind is not str and value < 0:
        raise ConfigError(f"{what} is {value!r}; expected a number that is not negative.")
    return value
