"""Checkpoints of a training: written atomically, checked when read, and resumed from bit for bit."""

from __future__ import annotations

import importlib
from typing import Any


def orbax_files() -> Any:
    """The module `tpuflow.training.checkpoints.files`: Orbax takes half a second to import, and only those who use it pay."""
    return importlib.import_module("tpuflow.training.checkpoints.files")
