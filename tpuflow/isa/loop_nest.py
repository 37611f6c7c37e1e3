"""A kernel's grid as nested loops: the order in which its sections run, and the grid index of each run.

for point in parallel grid axes:
    prologue
    for step in sequential grid axes:
        body
    epilogue
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tpuflow.isa.instruction import Tile, TileAxis
from tpuflow.isa.program import SECTIONS, GridAxis


@dataclass(frozen=True, slots=True)
class Iteration:
    """One execution of a section: number of the point, of the step in it, count of steps before in the kernel, index of every grid axis."""

    point: int
    step: int
    count: int
    index: tuple[int, ...]

    def slot(self, tile: Tile) -> int:
        """The slot of a tile that this execution uses."""
        return (self.count if tile.rate == "step" else self.point) % tile.slots

    def start(self, axis: TileAxis) -> int:
        """The position of a tile axis' first element on the whole axis."""
        return self.index[axis.grid] * axis.size if axis.grid >= 0 else 0


@dataclass(frozen=True, slots=True)
class LoopNest:
    """The loops of a grid, its parallel axes first."""

    grid: Sequence[GridAxis]

    def _sizes(self, kind: str) -> list[int]:
        return [axis.size for axis in self.grid if axis.kind == kind]

    @property
    def points(self) -> int:
        """Trips over all parallel axes."""
        return math.prod(self._sizes("parallel"))

    @property
    def steps(self) -> int:
        """Trips over all sequential axes, at each point."""
        return math.prod(self._sizes("sequential"))

    def runs(self, section: str) -> int:
        """How often a section runs."""
        return self.points * self.steps if section == "body" else self.points

    def fixed_indices(self, section: str) -> Mapping[int, int]:
        """The indices of the grid axes that a section does not run over, the sequential ones: in the prologue those of the first step, in
        the epilogue those of the last step; none for the body."""
        if section == "body":
            return {}
        return {g: max(0, a.size - 1) if section == "epilogue" else 0 for g, a in enumerate(self.grid) if a.kind == "sequential"}

    def walk(self, sections: Collection[str] = SECTIONS) -> Iterator[tuple[str, Iteration]]:
        """Every run of some of the sections, in program order."""
        parallel, sequential, steps = self._sizes("parallel"), self._sizes("sequential"), self.steps
        first, last = (tuple(self.fixed_indices(s).values()) for s in ("prologue", "epilogue"))
        final = max(0, steps - 1)
        for n, point in enumerate(_indices(parallel)):
            start = n * steps
            if "prologue" in sections:
                yield "prologue", Iteration(n, 0, start, point + first)
            if "body" in sections:
                for s, step in enumerate(_indices(sequential)):
                    yield "body", Iteration(n, s, start + s, point + step)
            if "epilogue" in sections:
                yield "epilogue", Iteration(n, final, start + final, point + last)


def _indices(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All indices of a grid, row-major, one at a time (`itertools.product` holds every axis in memory)."""
    if not sizes:
        yield ()
        return
    for outer in _indices(sizes[:-1]):
        for i in range(sizes[-1]):
            yield (*outer, i)
