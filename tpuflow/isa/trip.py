"""What an instruction's meaning may know of the trip of the grid that it runs in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tpuflow.isa.instruction import TileAxis


@dataclass(frozen=True, slots=True)
class Trip:
    """`shape` is the valid shape of the (first) tile that is written, `start(axis)` the position on the whole axis at which a tile's axis
    begins: an integer, traced or not."""

    shape: tuple[int, ...]
    start: Callable[[TileAxis], Any]
