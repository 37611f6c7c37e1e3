"""The part of its place in the grid that an instruction's meaning may depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tpuflow.isa.instruction import TileAxis


@dataclass(frozen=True, slots=True)
class Trip:
    """`shape` is the valid shape of the (first) tile that is written; `start(axis)` is the position of a tile axis' first element on the
    whole axis, an integer that may be traced."""

    shape: tuple[int, ...]
    start: Callable[[TileAxis], Any]
