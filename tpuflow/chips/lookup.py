"""`get_chip`: a row by name, by TOML file, or as it is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tpuflow.chips.catalog import CHIPS
from tpuflow.chips.chip import Chip
from tpuflow.chips.toml import from_mapping, read_toml
from tpuflow.errors import ConfigError, unknown

BASE = "base"
FITTED = "Constants that are fitted (kernel_seconds, hbm_share, ...) belong in a calibration's file: docs/timing.md."


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
    if isinstance(chip, str) and chip in CHIPS:
        return CHIPS[str(chip)]
    raise unknown("chip", str(chip), sorted(CHIPS), "a .toml file or a tpuflow.Chip of your own")


def _from_toml(path: Path) -> Chip:
    row = read_toml(path, "chip", "tpuflow.Chip")
    base = base_of(row, path)
    start = {} if base is None else dataclasses.asdict(base)
    row = {**start, "name": path.stem, "source": f"{path.name}{f', on {base.name}' if base else ''}", **row}
    return from_mapping(Chip, row, str(path), "chip", unknown=FITTED, missing=f'Give them, or a row to start from: {BASE} = "generic".')


def base_of(row: dict[str, Any], path: Path) -> Chip | None:
    """The chip that a TOML file's row starts from; its field is taken out of the row. None without one.

    Raises:
      ConfigError: it is no chip.
    """
    base = row.pop(BASE, None)
    try:
        return None if base is None else get_chip(base)
    except ConfigError as error:
        raise ConfigError(f"{path}: {BASE}: {error}") from error
