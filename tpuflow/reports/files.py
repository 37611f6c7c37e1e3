"""Report files: they appear whole or not at all."""

from __future__ import annotations

import json
import os
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
    """Write plain data as JSON.

    Raises:
      ConfigError: the file cannot be written.
    """
    text = json.dumps(data, separators=(",", ":")) if compact else json.dumps(data, indent=1)
    write_text(path, text + "\n")
