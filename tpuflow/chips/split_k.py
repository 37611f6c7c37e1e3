"""How a chip's cores divide a grid of points and steps, and what that costs: one rule for the choice of tiles and for the timing.

Cores take points of the grid, equally many each. A grid with fewer points than there are cores is split over its steps too (split-K): each
core of a point's group works out its steps, sends every other core of the group that core's piece of the partial sum, and adds what it is
sent to its own piece. At the end the point's own core collects the pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tpuflow.chips.chip import Chip


@dataclass(frozen=True, slots=True)
class Division:
    """Who does what: `cores` at work, the `points` of the busiest one, `steps` of each that it does itself, how many cores `share` a point,
    and the steps of a point that the `others` of them do."""

    cores: int
    points: int
    steps: int
    share: int = 1
    others: int = 0


def may_split(chip: Chip, points: int, steps: int) -> bool:
    """Whether there are cores without a point of their own, and steps for them."""
    return chip.cores // max(points, 1) > 1 and steps > 1


def divide(chip: Chip, points: int, steps: int, *, splits: bool) -> Division:
    """The division of a grid; `splits` says whether steps only add to what others do, so that they can be worked out apart."""
    if not (splits and may_split(chip, points, steps)):
        cores = max(1, min(chip.cores, points))
        return Division(cores, -(-points // cores), steps)
    each = -(-steps // (chip.cores // max(points, 1)))
    share = -(-steps // each)
    return Division(points * share, 1, each, share, steps - each)


@dataclass(frozen=True, slots=True)
class PartialSums:
    """What cores that share a point add up: cycles and bytes of a core's piece for every step of another core, and the bytes that the
    point's own core collects at the end."""

    cycles: int = 0
    piece_bytes: int = 0
    collected_bytes: int = 0


def partial_sums(chip: Chip, sums: Sequence[tuple[tuple[int, ...], int]], share: int) -> PartialSums:
    """The price for sums of (shape, bytes of an element), where so many cores share a point."""
    if share == 1:
        return PartialSums()
    cycles = sum(-(-chip.vector_cycles(shape, element_bytes) // share) + math.ceil(chip.issue_cycles) for shape, element_bytes in sums)
    moved = sum(math.prod(shape) * element_bytes for shape, element_bytes in sums)
    return PartialSums(cycles, -(-moved // share), moved)
