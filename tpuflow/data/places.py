"""Where data sets lie on this machine: the folder that TPUFLOW_DATA names, then the user's cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE = "TPUFLOW_DATA"


def cache_dir() -> Path:
    """The user's cache folder for tpuflow on this platform; it need not exist yet."""
    home = Path.home()
    base = {
        "win32": os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local",
        "darwin": home / "Library" / "Caches",
    }.get(sys.platform, os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return Path(base) / "tpuflow"


def shared_dir() -> Path | None:
    """The folder that $TPUFLOW_DATA names, whether it exists or not; None if it is not set."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def data_dirs() -> list[Path]:
    """Where data sets are looked for, in this order, unless a user names a folder."""
    shared = shared_dir()
    return [*([shared] if shared else []), cache_dir()]
