"""How a kernel is cut: the axes of its iteration space, the tile of each, and which of them come in sequence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from tpuflow.errors import CompileError
from tpuflow.lower.graph.accesses import Access

NO_UNITS: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TiledAxis:
    """An axis of an iteration space, cut into tiles of `tile` elements; `sequential`: these come one after the other on one core."""

    size: int
    tile: int
    sequential: bool = False

    def __str__(self) -> str:
        cut = str(self.size) if self.tile == self.size else f"{self.tile} of {self.size}"
        return f"{cut} sequential" if self.sequential else cut


@dataclass(frozen=True, slots=True)
class Tiling:
    """The axes of a kernel, and in how many parts, one after the other, a step works on its batches.

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
    """An iteration space, and what its tilings keep, so that no bit depends on them.

    The axes `sequential` come in sequence where they are cut. Those of `whole` are not cut, and those of `exact` into tiles of just that
    length. What is summed in order is cut along the axes `units` (major to minor) into multiples of a unit, a block's box: the minor ones
    stay whole, one is cut, and those above it into single units.
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
        """That a tiling is one of this space.

        Raises:
          CompileError: it is not; with the tiling, and what it should be.
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
        """What an axis should be cut into, in words, where it is not."""
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
