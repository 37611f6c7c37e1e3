"""What a store touches over its grid: whether each element once, which part of the buffer, and whether two parts are disjoint."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpuflow.device.verify.dims import split_alike, stretches
from tpuflow.isa.instruction import Tile, TileAxis, Window, WindowAxis
from tpuflow.isa.loop_nest import LoopNest
from tpuflow.isa.program import Kernel
from tpuflow.isa.windows import present, view_layout

PROVABLE_CELLS = 2**22  # painted in a few milliseconds
MOST_VISITS = 2**26
MOST_POSITIONS = 2**16
MOST_PAIRED = 32


@dataclass(frozen=True, slots=True)
class Trips:
    """The grid axes that a section runs over, with their sizes (`free`), and the indices of the others (`fixed`)."""

    free: Mapping[int, int]
    fixed: Mapping[int, int]


def section_trips(kernel: Kernel, section: str) -> Trips:
    """The trips of a section of a kernel."""
    fixed = LoopNest(kernel.grid).fixed_indices(section)
    return Trips({g: a.size for g, a in enumerate(kernel.grid) if g not in fixed}, fixed)


@dataclass(frozen=True, slots=True)
class _Term:
    """`count` positions `stride` apart as grid axis `grid` (-1: none) and the tile's element move; `inner` of them within one tile."""

    stride: int
    count: int
    inner: int
    grid: int

    def spread(self, open_axes: Collection[int]) -> int:
        """Positions that are still unsettled when only the grid axes in `open_axes` are."""
        return self.count if self.grid < 0 or self.grid in open_axes else self.inner


@dataclass(frozen=True, slots=True)
class _Axis:
    """A window axis over its trips, terms by growing stride. Not `exact` if a clipped tail makes them touch less than they say."""

    start: int
    terms: tuple[_Term, ...]
    exact: bool
    moving: bool  # by a register that is not the same at every grid index


def _axis_terms(axis: WindowAxis, tile: TileAxis, trips: Trips, *, moving: bool) -> _Axis:
    start = axis.origin + sum(e * trips.fixed[g] for g, e in axis.grid if g in trips.fixed)
    moves = {g: e for g, e in axis.grid if trips.free.get(g, 1) > 1}
    exact = True
    if tile.grid in moves and moves[tile.grid] == axis.step * tile.size:
        own = _Term(axis.step, tile.extent, tile.size, tile.grid)
        del moves[tile.grid]
    elif tile.grid in trips.fixed or trips.free.get(tile.grid) == 1:
        length = tile.valid(trips.fixed.get(tile.grid, 0))
        own = _Term(axis.step, length, length, -1)
    else:
        own = _Term(axis.step, tile.size, tile.size, -1)
        exact = tile.grid < 0 or tile.extent % tile.size == 0
    terms = (own, *(_Term(e, trips.free[g], 1, g) for g, e in moves.items()))
    return _Axis(start, tuple(sorted((t for t in terms if t.count != 1), key=lambda t: abs(t.stride))), exact, moving)


def injective(window: Window, trips: Trips, constant: Collection[Tile], rows: TileAxis | None = None) -> bool:
    """Whether no element is written twice over the trips: axis by axis, strides outgrow what the smaller ones reach.

    The test is sufficient, not necessary. constant: registers that hold one value at every grid index. rows: axis 0 of an indexed
    store, whose row numbers take the place of positions: each row must come once for every position of the other axes.
    """
    pairs = list(zip(window.axes, window.tile.axes, strict=True))
    pending = [_axis_terms(a, t, trips, moving=a.register is not None and a.register not in constant) for a, t in pairs]
    if rows is not None:
        grid = ((rows.grid, rows.size),) if rows.grid >= 0 else ()
        pending[0] = _axis_terms(WindowAxis(rows.whole, 1, grid=grid), rows, trips, moving=False)
    unsettled = {g for g, n in trips.free.items() if n > 1}
    while pending:
        ready = [a for a in pending if not (a.moving and unsettled) and _outgrow(a, unsettled)]
        if not ready:
            return False
        for axis in ready:
            unsettled -= {t.grid for t in axis.terms}
            pending.remove(axis)
    return not unsettled


def _outgrow(axis: _Axis, unsettled: Collection[int]) -> bool:
    reach = 0
    for term in axis.terms:
        count = term.spread(unsettled)
        if count > 1 and abs(term.stride) <= reach:
            return False
        reach += abs(term.stride) * (count - 1)
    return True


# --- boxes


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a dense buffer: a range of positions for every dimension of a reshape of it, dimensions merged where they can be."""

    dims: tuple[int, ...]
    ranges: tuple[range, ...]

    @property
    def full(self) -> bool:
        """Whether it is all of the buffer."""
        return all(r == range(n) for r, n in zip(self.ranges, self.dims, strict=True))

    @property
    def empty(self) -> bool:
        """Whether it is nothing."""
        return any(len(r) == 0 for r in self.ranges)


def store_box(window: Window, trips: Trips) -> Box | None:
    """The part of the buffer that a store writes over its trips; None if it is not a box, or depends on a register."""
    if 0 in trips.free.values():
        return Box((0,), (range(0),))
    axes = [_axis_terms(a, t, trips, moving=a.register is not None) for a, t in zip(window.axes, window.tile.axes, strict=True)]
    used = [t.grid for a in axes for t in a.terms if t.grid >= 0]
    if len(set(used)) != len(used) or any(a.moving or not a.exact for a in axes):
        return None
    ranges = [_elements(a, w) for a, w in zip(axes, window.axes, strict=True)]
    if any(r is None for r in ranges):
        return None
    order = sorted(range(len(ranges)), key=view_layout(window).permutation.__getitem__)
    return _merged([(window.axes[i].extent, r) for i in order if (r := ranges[i]) is not None])


def _elements(axis: _Axis, window: WindowAxis) -> range | None:
    """Elements of the view axis that are touched, if they are evenly spaced."""
    positions = _progression(axis)
    if positions is None:
        return _enumerated(axis, window)
    walk = WindowAxis(window.extent, window.pitch, step=positions.step, dilation=window.dilation)
    return _canonical(present(walk, len(positions), positions.start)[1])


def _enumerated(axis: _Axis, window: WindowAxis) -> range | None:
    """`_elements` by looking at every position, if they are not too many."""
    terms = _spread(axis)
    if math.prod(t.count for t in terms) > MOST_POSITIONS:
        return None
    offsets = [t.stride * np.arange(t.count, dtype=np.int64) for t in terms]
    at = np.unique(axis.start + sum(np.ix_(*offsets)))
    at = at[at % window.dilation == 0] // window.dilation
    at = at[(at >= 0) & (at < window.extent)]
    gaps = set(np.diff(at).tolist())
    return None if len(gaps) > 1 else _canonical(range(int(at[0]), int(at[-1]) + 1, gaps.pop() if gaps else 1) if at.size else range(0))


def _spread(axis: _Axis) -> list[_Term]:
    """The terms that add positions (a stretched one touches the same again)."""
    return [t for t in axis.terms if t.stride or not t.count]


def _progression(axis: _Axis) -> range | None:
    """All positions as one range, if every stride is a multiple of the least one and no more than what the smaller ones span."""
    terms = _spread(axis)
    if any(t.count == 0 for t in terms):
        return range(0)
    low, span, unit = axis.start, 1, abs(terms[0].stride) if terms else 1
    for term in terms:
        strides, rest = divmod(abs(term.stride), unit)
        if rest or strides > span:
            return None
        low += min(0, term.stride * (term.count - 1))
        span += strides * (term.count - 1)
    return range(low, low + unit * span, unit)


def _canonical(r: range) -> range:
    """Equal ranges written one way."""
    return range(0) if not r else range(r[0], r[-1] + 1, r.step if len(r) > 1 else 1)


def _merged(dims: list[tuple[int, range]]) -> Box:
    """Row-major dimensions, a whole inner one joined with the one around it."""
    made: list[tuple[int, range]] = []
    for size, r in reversed(dims):
        if size == 1 and len(r) == 1:
            continue
        if made and made[-1][1] == range(made[-1][0]) and r.step == 1:
            inner = made[-1][0]
            made[-1] = (size * inner, _canonical(range(r.start * inner, r.stop * inner)))
        else:
            made.append((size, r))
    return Box(tuple(n for n, _ in reversed(made)), tuple(r for _, r in reversed(made)))


def disjoint(x: Box | None, y: Box | None) -> bool:
    """Whether two parts of one buffer certainly share no element."""
    if x is None or y is None:
        return False
    if x.empty or y.empty:
        return True
    for one, other in ((x, _refined(y, x.dims)), (_refined(x, y.dims), y)):
        if one is not None and other is not None:
            return any(_apart(a, b) for a, b in zip(one.ranges, other.ranges, strict=True))
    (low, high), (first, last) = _flat_bounds(x), _flat_bounds(y)
    return high < first or last < low


def _refined(box: Box, dims: tuple[int, ...]) -> Box | None:
    """The same part over finer dimensions: a merged one is whole inner ones again; None if these dimensions are not finer."""
    ranges: list[range] = []
    left = list(dims)
    for size, r in zip(reversed(box.dims), reversed(box.ranges), strict=True):
        inner = 1
        while left and inner * left[-1] < size:
            ranges.insert(0, range(left[-1]))
            inner *= left.pop()
        if not left or inner * left.pop() != size or (inner > 1 and (r.step != 1 or r.start % inner or r.stop % inner)):
            return None
        ranges.insert(0, r if inner == 1 else range(r.start // inner, r.stop // inner))
    return None if left else Box(dims, tuple(ranges))


def _apart(a: range, b: range) -> bool:
    if a[-1] < b[0] or b[-1] < a[0]:
        return True
    unit = math.gcd(*(r.step if len(r) > 1 else 0 for r in (a, b)))  # a single element is in step with whatever meets it
    return unit > 0 and (a[0] - b[0]) % unit != 0


def _flat_bounds(box: Box) -> tuple[int, int]:
    low = high = 0
    for n, r in zip(box.dims, box.ranges, strict=True):
        low, high = low * n + r[0], high * n + r[-1]
    return low, high


def clash(boxes: Sequence[Box | None]) -> int | None:
    """The number of a part that is not shown to share no element with the others; None if all are apart."""
    if len(boxes) < 2:
        return None
    unknown = next((n for n, box in enumerate(boxes) if box is None), None)
    if unknown is not None:
        return max(unknown, 1)
    spans = sorted((*_flat_bounds(b), n) for n, b in enumerate(boxes) if b is not None and not b.empty)
    group: list[int] = []
    reach = -1
    for low, high, n in spans:
        if group and low > reach:
            if (found := _clash_within(boxes, sorted(group))) is not None:
                return found
            group = []
        group.append(n)
        reach = max(reach, high)
    return _clash_within(boxes, sorted(group))


def _clash_within(boxes: Sequence[Any], group: Sequence[int]) -> int | None:
    """`clash` of parts that lie between one another: few of them pair by pair, many by painting the cells that they cut."""
    if len(group) <= MOST_PAIRED:
        return next((n for i, n in enumerate(group) for m in group[:i] if not disjoint(boxes[n], boxes[m])), None)
    grid = _Grid.of([boxes[n] for n in group])
    if grid is None:
        return group[-1]
    for n in group:
        cells = grid.cells(boxes[n])
        if grid.painted[cells].any():
            return n
        grid.painted[cells] = True
    return None


def cover(boxes: Sequence[Box], elems: int) -> bool:
    """Whether parts of a buffer of `elems` elements certainly make up all of it."""
    parts = [b for b in boxes if not b.empty]
    if any(b.full for b in parts) or elems == 0:
        return True
    if not parts or sum(math.prod(map(len, b.ranges)) for b in parts) < elems:
        return False
    if len({b.dims for b in parts}) > 1:
        split = split_alike([(b.dims, b.ranges) for b in parts])
        if split is None:
            return elems <= PROVABLE_CELLS and _cover_flat(parts, elems)
        parts = [Box(*part) for part in split]
    grid = _Grid.of(parts)
    if grid is None:
        return False
    for box in parts:
        grid.painted[grid.cells(box)] = True
    return bool(grid.painted.all())


def _cover_flat(parts: Sequence[Box], elems: int) -> bool:
    mask = np.zeros(elems, np.bool_)
    for box in parts:
        mask.reshape(box.dims)[tuple(slice(r.start, r.stop, r.step) for r in box.ranges)] = True
    return bool(mask.all())


@dataclass(frozen=True, slots=True)
class _Grid:
    """Dimensions cut where some box starts or ends: positions that stand for all that all boxes treat alike, painted or not."""

    places: tuple[np.ndarray, ...]
    painted: np.ndarray

    @staticmethod
    def of(boxes: Sequence[Box]) -> _Grid | None:
        """The cells of boxes with the same dimensions; None if the dimensions differ, or the cells (or visits of them) are too many."""
        if len({b.dims for b in boxes}) > 1:
            return None
        ranges = zip(*(b.ranges for b in boxes), strict=True)
        cuts = [stretches(n, rs) for n, rs in zip(boxes[0].dims, ranges, strict=True)]
        shape = [sum(map(len, cut)) for cut in cuts]
        if max(math.prod(shape), *shape) > PROVABLE_CELLS or math.prod(shape) * len(boxes) > MOST_VISITS:
            return None
        return _Grid(tuple(np.concatenate([np.arange(r.start, r.stop) for r in cut]) for cut in cuts), np.zeros(shape, np.bool_))

    def cells(self, box: Box) -> Any:
        """The cells that a box is made of, as an index."""
        if all(r.step == 1 for r in box.ranges):
            bounds = (np.searchsorted(at, (r.start, r.stop)) for at, r in zip(self.places, box.ranges, strict=True))
            return tuple(slice(int(low), int(high)) for low, high in bounds)
        inside = ((at >= r.start) & (at < r.stop) & ((at - r.start) % r.step == 0) for at, r in zip(self.places, box.ranges, strict=True))
        return np.ix_(*inside)
