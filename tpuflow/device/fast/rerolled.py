"""Kernels that do the same work twice in a trip, for two halves of their arrays, as kernels that do it once for both.

The compiler takes batches in two parts, so that matrix and vector unit overlap. XLA has no such units, and compiled everything twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tpuflow.device.fast.positions import CannotLift
from tpuflow.dtypes import exactly
from tpuflow.isa import dma, matrix, vector
from tpuflow.isa.instruction import Instruction, Tile, TileAxis, Window
from tpuflow.isa.program import GridAxis, Kernel

Makers = Sequence[Sequence[int]]
"""By tile that an instruction reads, the numbers of the instructions that may have written it last."""


def rerolled(kernel: Kernel) -> Kernel:
    """The same work on tiles of twice the size along an axis, without semaphores, which the real queues need; if it is no work on halves,
    the kernel itself."""
    try:
        return _Rerolling(kernel, kernel.instructions, _makers(kernel)).once()
    except CannotLift:
        return kernel


def _makers(kernel: Kernel) -> list[Makers]:
    """What made the tiles that each instruction reads: its own section before it, or else other sections, and the trip before."""
    before: Mapping[str, Sequence[str]] = {"prologue": (), "body": ("prologue", "body"), "epilogue": ("prologue", "body")}
    last: dict[str, dict[Tile, int]] = {}
    found: list[Makers] = []
    for name, section in kernel.sections:
        start, own = len(found), dict[Tile, int]()
        last[name] = {tile: start + n for n, i in enumerate(section) for tile in i.writes()}
        for n, i in enumerate(section, start):
            found.append([[own[t]] if t in own else [last[o][t] for o in before[name] if t in last[o]] for t in i.reads()])
            own.update(dict.fromkeys(i.writes(), n))
    return found


@dataclass(slots=True)
class _Rerolling:
    """`second`: of an instruction for the first half, the one that does the same for the second; of one for both, itself. `axes`: of an
    instruction, the axis along which what it writes has two halves, if it has. `whole`: that axis of a half's tiles."""

    kernel: Kernel
    instructions: Sequence[Instruction]
    makers: Sequence[Makers]
    second: dict[int, int] = field(default_factory=dict)
    axes: dict[int, int] = field(default_factory=dict)
    whole: TileAxis | None = None

    def once(self) -> Kernel:
        """The kernel once for both halves.

        Raises:
          CannotLift: it is none of two halves.
        """
        for first, second in self._pairs():
            self._match(first, second)
        self._check_halves()
        for n in sorted(self.second):
            self._find_axis(n)
        once = {n: self._doubled(n) for n in sorted(self.second)}
        kernel, sections, start = self.kernel, {}, 0
        for name, section in kernel.sections:
            sections[name] = tuple(once[n] for n in range(start, start + len(section)) if n in once)
            start += len(section)
        return replace(kernel, grid=self._grid(list(once.values())), semaphores=(), sources=(), **sections)

    def _grid(self, once: Sequence[Instruction]) -> tuple[GridAxis, ...]:
        """The grid, of twice as many trips along the axis that the halves are blocked by, which nothing else may be."""
        assert self.whole is not None
        block, grid = self.whole.grid, self.kernel.grid
        if block < 0:
            return grid
        tiles = [t for i in once for t in (*i.reads(), *i.writes())]
        _require(all(a == _twice(self.whole) for t in tiles for a in t.axes if a.grid == block))
        rows = [row for i in once for _, w in i.windows() for row in zip(w.axes, w.tile.axes, strict=True)]
        _require(all((block in dict(a.grid)) == (t.grid == block) for a, t in rows))
        return (*grid[:block], replace(grid[block], size=2 * grid[block].size), *grid[block + 1 :])

    def _pairs(self) -> list[tuple[int, int]]:
        """The stores in pairs, each into two halves of an array."""
        groups: dict[Any, list[int]] = {}
        for n, i in enumerate(self.instructions):
            if isinstance(i, dma.Store):
                groups.setdefault((i.window.buffer, tuple(replace(a, origin=0) for a in i.window.axes)), []).append(n)
        _require(bool(groups) and all(len(group) == 2 for group in groups.values()))
        windows = [(role, w) for i in self.instructions for role, w in i.windows()]
        _require({w.buffer for role, w in windows if role == "read"}.isdisjoint(w.buffer for role, w in windows if role == "write"))
        return [(first, second) for first, second in (sorted(group, key=self._origins) for group in groups.values())]

    def _origins(self, n: int) -> list[int]:
        return [a.origin for a in _window(self.instructions[n]).axes]

    def _match(self, n: int, other: int) -> None:
        """Match two instructions that do the same, and what made their operands."""
        if n in self.second:
            _require(self.second[n] == other)
            return
        self.second[n] = other
        _require(n == other or _alike(self.instructions[n], self.instructions[other]))
        for makers, others in zip(self.makers[n], self.makers[other], strict=True):
            _require(len(makers) == len(others))
            for pair in zip(makers, others, strict=True):
                self._match(*pair)

    def _check_halves(self) -> None:
        """Every instruction that works is for one half or for both."""
        others = [other for n, other in self.second.items() if n != other]
        work = {n for n, i in enumerate(self.instructions) if not isinstance(i, dma.Signal | dma.Wait)}
        _require(len(set(others)) == len(others) and self.second.keys().isdisjoint(others) and work == self.second.keys() | set(others))

    def _find_axis(self, n: int) -> None:
        """Note the axis of the halves in what an instruction writes, and make the operands that it shares between them as long."""
        i, operands = self.instructions[n], self.makers[n]
        if isinstance(i, dma.Load | dma.Store):
            axis = self._half(i.window, _window(self.instructions[self.second[n]]))
            _require(all(maker not in self.axes for a in i.window.axes if a.register for maker in self._making(n, a.register)))
            if isinstance(i, dma.Store):
                _require(axis is not None and all(self.axes.get(maker) == axis for maker in operands[-1]))
            elif axis is not None:
                self.axes[n] = axis
            return
        ways = _ways(i)
        found = {way[self.axes[m]] for way, makers in zip(ways, operands, strict=True) for m in makers if m in self.axes}
        _require(len(found) <= 1 and None not in found)
        for axis in found:
            assert axis is not None
            self._double(n, axis)

    def _making(self, n: int, tile: Tile) -> Sequence[int]:
        return self.makers[n][list(self.instructions[n].reads()).index(tile)]

    def _double(self, n: int, axis: int) -> None:
        """Have an instruction write twice as much along an axis: both halves, or twice the same."""
        if n in self.axes:
            _require(self.axes[n] == axis)
            return
        i = self.instructions[n]
        _require(not isinstance(i, dma.Load) and not (isinstance(i, vector.Iota) and i.axis == axis))
        self.axes[n] = axis
        for way, makers in zip(_ways(i), self.makers[n], strict=True):
            if axis in way and not (isinstance(i, vector.Broadcast) and i.a.axes[way.index(axis)].whole == 1):
                for maker in makers:
                    self._double(maker, way.index(axis))

    def _doubled(self, n: int) -> Instruction:
        """An instruction with its operands as long as they are made."""
        i, makers = self.instructions[n], iter(self.makers[n])
        found: dict[str, Any] = {}
        for name, kind, value in i.fields():
            if kind.name == "tile":
                of = {n} if kind.role == "write" else set(next(makers))
                found[name] = self._longer(value, of | {n} if kind.role == "both" else of)
            elif kind.name == "window":
                for _ in filter(None, (a.register for a in value.axes)):
                    next(makers)
                found[name] = replace(value, tile=self._longer(value.tile, {n} if kind.role == "read" else set(next(makers))))
            else:
                _require(kind.name != "tiles")
        return replace(i, **found)  # pyright: ignore[reportArgumentType] every instruction is a dataclass

    def _longer(self, tile: Tile, made: set[int]) -> Tile:
        """A tile as long as the instructions make it that write it."""
        axes = {self.axes.get(n) for n in made}
        _require(len(axes) == 1)
        (axis,) = axes
        if axis is None:
            return tile
        _require(tile.axes[axis] == self.whole)
        return replace(tile, axes=(*tile.axes[:axis], _twice(tile.axes[axis]), *tile.axes[axis + 1 :]))

    def _half(self, window: Window, other: Window) -> int | None:
        """The axis along which a window's tiles end where the other's begin; None if they are at one place."""
        moved = [(n, b.origin - a.origin) for n, (a, b) in enumerate(zip(window.axes, other.axes, strict=True)) if a.origin != b.origin]
        if not moved:
            return None
        _require(len(moved) == 1)
        ((axis, by),) = moved
        own, tile = window.axes[axis], window.tile.axes[axis]
        self.whole = self.whole or tile
        blocks = ((tile.grid, tile.size),) if tile.grid >= 0 else ()
        _require(tile == self.whole and by == tile.whole and (own.grid, own.step, own.dilation) == (blocks, 1, 1))
        _require(tile.grid < 0 or tile.size * self.kernel.grid[tile.grid].size == tile.extent)
        return axis


def _ways(i: Instruction) -> Sequence[Sequence[int | None]]:
    """Of each tile that an instruction reads, to which axis of what it writes each of its axes belongs; None: to none."""
    if isinstance(i, vector.Constant | vector.Iota | matrix.MatmulZero):
        return ()
    if isinstance(i, vector.Broadcast):
        return (i.axes,)
    if isinstance(i, vector.Transpose):
        return (tuple(map(i.permutation.index, range(len(i.permutation)))),)
    if isinstance(i, vector.ReduceInto):
        own = range(len(i.a.axes))
        return own, [None if axis in i.axes else axis for axis in own]
    if isinstance(i, matrix.MatmulAccumulate):
        _require(not i.pairs and not i.bounds)
        place = {label: axis for axis, label in enumerate(i.acc_axes)}
        return tuple(map(tuple, ([place.get(label) for label in labels] for labels in (i.acc_axes, i.a_axes, i.b_axes))))
    _require(i.has("elementwise") and len(i.writes()) == 1)
    return [range(len(t.axes)) for t in i.reads()]


def _alike(i: Instruction, other: Instruction) -> bool:
    """Whether two instructions differ in nothing but which tiles they use, and where their windows begin."""
    if type(i) is not type(other):
        return False
    rows = zip(i.fields(), other.fields(), strict=True)
    return all(_form(kind.name, value) == _form(kind.name, found) for (_, kind, value), (_, _, found) in rows)


def _form(kind: str, value: Any) -> Any:
    if kind == "tile":
        return value.space, value.dtype, value.axes
    if kind == "window":
        axes = tuple(replace(a, origin=0, register=None if a.register is None else replace(a.register, address=0)) for a in value.axes)
        return value.buffer, exactly(value.fill), _form("tile", value.tile), axes
    return exactly(value) if kind == "immediate" else value


def _window(i: Instruction) -> Window:
    ((_, window),) = i.windows()
    return window


def _twice(axis: TileAxis) -> TileAxis:
    return TileAxis(2 * axis.size) if axis.grid < 0 else replace(axis, extent=2 * axis.extent)


def _require(holds: bool) -> None:
    if not holds:
        raise CannotLift("the kernel does not do the same work twice")
