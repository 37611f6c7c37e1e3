"""How a chip's cores share a grid of points and steps, and what that costs: one rule for the choice of tiles and for the timing.

Cores take points of the grid, equally many each. A grid with fewer points than there are cores lends the idle ones to the points: steps
are shared out too, and so is what is added up over them: each of a point's cores works out its steps, sends every core of the point the
piece of the sum that is that one's, and adds what it is sent to its own piece. At the end the point's own core collects the pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tpuflow.chips.chip import Chip


@dataclass(frozen=True, slots=True)
class Team:
    """Who does what: `cores` at work, the `points` of the busiest one, `steps` of each that it does itself, the `size` of a point's team,
    and the steps of a point that the `others` of its team do."""

    cores: int
    points: int
    steps: int
    size: int = 1
    others: int = 0


def team(chip: Chip, points: int, steps: int, *, sharing: bool) -> Team:
    """The division of a grid; `sharing` says whether steps only add to what the others do, so that they can be worked out apart."""
    helpers = chip.cores // max(points, 1)
    if helpers < 2 or steps < 2 or not sharing:
        cores = max(1, min(chip.cores, points))
        return Team(cores, -(-points // cores), steps)
    own = -(-steps // helpers)
    size = -(-steps // own)
    return Team(points * size, 1, own, size, steps - own)


@dataclass(frozen=True, slots=True)
class Adding:
    """What a team adds up: cycles and bytes of a core's piece for every step of another core, and the bytes that the point's own core
    collects at the end."""

    cycles: int = 0
    piece_bytes: int = 0
    collected_bytes: int = 0


def adding(chip: Chip, sums: Sequence[tuple[tuple[int, ...], int]], size: int) -> Adding:
    """The price for sums of (shape, bytes of an element), in a team of that size."""
    if size == 1:
        return Adding()
    cycles = sum(-(-chip.vector_cycles(shape, element_bytes) // size) + math.ceil(chip.issue_cycles) for shape, element_bytes in sums)
    moved = sum(math.prod(shape) * element_bytes for shape, element_bytes in sums)
    return Adding(cycles, -(-moved // size), moved)
