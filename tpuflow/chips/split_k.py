"""How a chip's cores divide a grid of points and steps, and what that costs: one rule for the choice of tiles and for the timing.

Each core takes as many points of the grid as the others. If there are fewer points than cores, the steps of a point are divided as well
(split-K): a group of cores works on one point, each on its share of the steps, and the partial sums are reduced as in a reduce-scatter:
each core sends every other core of the group that core's piece, and adds what it receives to its own piece. In the end one core of the
group gathers the pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tpuflow.chips.chip import Chip


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a grid: `cores` that have work, the `points` of the busiest of them and the `steps` of each that it runs itself,
    `cores_per_point`, and the `other_steps` of a point, which the other cores of its group run."""

    cores: int
    points: int
    steps: int
    cores_per_point: int = 1
    other_steps: int = 0


def may_split(chip: Chip, points: int, steps: int) -> bool:
    """Whether there are at least twice as many cores as points, and steps to divide."""
    return chip.cores // max(points, 1) > 1 and steps > 1


def divide(chip: Chip, points: int, steps: int, *, splits: bool) -> Division:
    """The division of a grid; splits: whether its steps only accumulate, so that cores can share a point (`isa.core_shares`)."""
    if not (splits and may_split(chip, points, steps)):
        cores = max(1, min(chip.cores, points))
        return Division(cores, -(-points // cores), steps)
    each = -(-steps // (chip.cores // max(points, 1)))
    group = -(-steps // each)
    return Division(points * group, 1, each, group, steps - each)


@dataclass(frozen=True, slots=True)
class PartialSums:
    """The cost of reducing partial sums: for every step that another core ran, the `cycles` to add a core's piece and its `piece_bytes`;
    the `collected_bytes` that one core gathers at the end of a point."""

    cycles: int = 0
    piece_bytes: int = 0
    collected_bytes: int = 0


def partial_sums(chip: Chip, sums: Sequence[tuple[tuple[int, ...], int]], cores_per_point: int) -> PartialSums:
    """The cost of reducing accumulators, given as (shape, bytes of an element)."""
    if cores_per_point == 1:
        return PartialSums()
    cycles = sum(-(-chip.vector_cycles(shape, size) // cores_per_point) + math.ceil(chip.issue_cycles) for shape, size in sums)
    moved = sum(math.prod(shape) * element_bytes for shape, element_bytes in sums)
    return PartialSums(cycles, -(-moved // cores_per_point), moved)
