"""Quantities as reports print them, each with the unit that suits it; page.js has the same in JavaScript."""

from __future__ import annotations

_BINARY = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_DECIMAL = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def bytes_text(count: float) -> str:
    """Bytes: "1.50 MiB"."""
    return next((f"{count / size:.2f} {unit}" for unit, size in _BINARY if count >= size), f"{count:.0f} B")


def count_text(count: float) -> str:
    """A number of operations: "38.6 G"."""
    return next((f"{count / size:.1f} {unit}" for unit, size in _DECIMAL if count >= size), f"{count:.4g}")
