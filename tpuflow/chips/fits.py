"""Efficiency constants by chip family; written by `python -m bench.accuracy --fit` from published times (docs/accuracy.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FITS: Mapping[str, Mapping[str, Any]] = {}
