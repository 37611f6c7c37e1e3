"""Report files: they appear whole or not at all."""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpuflow.errors import ConfigError


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file under a temporary name in the same folder, then rename it.

    Raises:
      ConfigError: the file cannot be written.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(
            f"{target}: cannot be written ({error.strerror}); give a path in a folder that exists and may be written."
        ) from error


def write_json(path: str | os.PathLike[str], data: Any, *, compact: bool = False) -> None:
    """Write plain data as JSON, which lacks NaN and infinities: they become the strings "nan", "inf" and "-inf".

    Raises:
      ConfigError: the file cannot be written.
    """
    form: dict[str, Any] = {"separators": (",", ":")} if compact else {"indent": 1}
    write_text(path, json.dumps(_plain(data), allow_nan=False, **form) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class PlainData(ABC):
    """What can be taken, and written, as plain data."""

    __slots__ = ()

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data."""

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write `as_dict` as JSON; the file appears whole or not at all. Numbers that JSON lacks become strings.

        Raises:
          ConfigError: the file cannot be written.
        """
        write_json(path, self.as_dict())
