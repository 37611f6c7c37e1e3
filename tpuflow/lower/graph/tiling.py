"""Tilings: the axes of a kernel's iteration space, the tile of each, and which of them are sequential."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from tpuflow.errors import CompileError
from tpuflow.lower.graph.accesses import Access

NO_UNITS: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TiledAxis:
    """An axis of an iteration space in tiles of `tile` elements; the tiles of a `sequential` axis run in order on one core."""

    size: int
    tile: int
    sequential: bool = False

    def __str__(self) -> str:
        cut = str(self.size) if self.tile == self.size else f"{self.tile} of {self.size}"
        return f"{cut} sequential" if self.sequential else cut


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiled axes of a kernel; `parts`: into how many parts, software-pipelined, a step divides its batches (row kernels).

    `reads` and `writes`: which elements of its operands belong to a point of the iteration space, where that is known.
    """

    axes: tuple[TiledAxis, ...]
    parts: int = 1
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()

    @classmethod
    def of(cls, sizes: Sequence[int], tile: Sequence[int], sequential: Collection[int] = (), parts: int = 1) -> Tiling:
        """Axes of these sizes in tiles; those of `sequential` come in sequence if they are cut."""
        return cls(tuple(TiledAxis(n, t, t < n and a in sequential) for a, (n, t) in enumerate(zip(sizes, tile, strict=True))), parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The iteration space."""
        return tuple(axis.size for axis in self.axes)

    @property
    def tile(self) -> tuple[int, ...]:
        """The length of a tile along every axis."""
        return tuple(axis.tile for axis in self.axes)

    def __str__(self) -> str:
        axes = f"[{', '.join(map(str, self.axes))}]"
        return axes if self.parts == 1 else f"{axes} parts {self.parts}"


@dataclass(frozen=True, slots=True)
class Space:
    """An iteration space and the constraints on its tilings, which keep the order of sums and so every bit.

    sequential: axes that are sequential where they are cut. whole: axes that are not cut. exact: axis -> the only tile length allowed.
    units: the axes of an ordered sum, major to minor, with the shape of its block: minor axes stay whole, one is cut into a multiple of
    its unit, and the axes above it into single units.
    """

    sizes: tuple[int, ...]
    sequential: tuple[int, ...] = ()
    whole: Collection[int] = ()
    units: Mapping[int, int] = field(default_factory=lambda: NO_UNITS)
    exact: Mapping[int, int] = field(default_factory=lambda: NO_UNITS)

    def tiling(self, tile: Sequence[int], parts: int = 1) -> Tiling:
        """The tiling with tiles of a size."""
        return Tiling.of(self.sizes, tile, self.sequential, parts)

    def check(self, tiling: Tiling) -> None:
        """Check that a tiling is of this space and keeps its constraints.

        Raises:
          CompileError: it does not; says which axis and what is expected.
        """
        if tiling.sizes != self.sizes:
            raise CompileError(f"the tiling {tiling} is of the space {list(tiling.sizes)}; the kernel's is {list(self.sizes)}.")
        for a, axis in enumerate(tiling.axes):
            if (wanted := self._wanted(a, axis)) is not None:
                raise CompileError(f"the tiling {tiling} cuts axis {a} into {axis}; it should be {wanted}, so that sums keep their order.")
        cut = False
        for a, unit in reversed(list(self.units.items())):
            if cut and tiling.tile[a] != unit:
                raise CompileError(
                    f"the tiling {tiling} cuts axis {a} into {tiling.axes[a]}; as an axis below it is cut, it should be {unit}."
                )
            cut = cut or tiling.tile[a] < self.sizes[a]

    def _wanted(self, a: int, axis: TiledAxis) -> str | None:
        """The tile that an axis should have, as text for an error; None if it has it."""
        if not 1 <= axis.tile <= max(axis.size, 1):
            return f"1 to {axis.size} elements"
        if axis.sequential != (a in self.sequential and axis.tile < axis.size):
            return f"{TiledAxis(axis.size, axis.tile, not axis.sequential)}"
        if a in self.whole and axis.tile != axis.size:
            return f"{axis.size}, whole"
        if a in self.exact and axis.tile != self.exact[a]:
            return f"{self.exact[a]}, a block of its sum"
        if a in self.units and axis.tile != axis.size and axis.tile % self.units[a]:
            return f"a multiple of {self.units[a]}, a block of its sum"
        return None
