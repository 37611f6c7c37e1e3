"""A kernel's grid as nested loops: which of its sections runs when, and where the grid stands then.

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
class At:
    """One run of a section: the point's number, the step's number in the point, the steps so far, the index of every grid axis."""

    point: int
    step: int
    count: int
    index: tuple[int, ...]

    def slot(self, tile: Tile) -> int:
        """The slot of a tile that is used."""
        return (self.count if tile.rate == "step" else self.point) % tile.slots

    def start(self, axis: TileAxis) -> int:
        """The position on the whole axis at which a tile's axis begins."""
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

    def standing(self, section: str) -> Mapping[int, int]:
        """The grid axes that a section does not run over, and where they stand: at the first step in the prologue, at the last in the
        epilogue."""
        if section == "body":
            return {}
        return {g: max(0, a.size - 1) if section == "epilogue" else 0 for g, a in enumerate(self.grid) if a.kind == "sequential"}

    def walk(self, sections: Collection[str] = SECTIONS) -> Iterator[tuple[str, At]]:
        """Every run of some of the sections, in program order."""
        parallel, sequential, steps = self._sizes("parallel"), self._sizes("sequential"), self.steps
        first, last = (tuple(self.standing(s).values()) for s in ("prologue", "epilogue"))
        final = max(0, steps - 1)
        for n, point in enumerate(_indices(parallel)):
            start = n * steps
            if "prologue" in sections:
                yield "prologue", At(n, 0, start, point + first)
            if "body" in sections:
                for s, step in enumerate(_indices(sequential)):
                    yield "body", At(n, s, start + s, point + step)
            if "epilogue" in sections:
                yield "epilogue", At(n, final, start + final, point + last)


def _indices(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All indices of a grid, row-major, one at a time (`itertools.product` holds every axis in memory)."""
    if not sizes:
        yield ()
        return
    for outer in _indices(sizes[:-1]):
        for i in range(sizes[-1]):
            yield (*outer, i)
