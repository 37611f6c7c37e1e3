"""Gradients of max and min pooling: find the selected position of each window, then gather for every element what its windows send it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from tpuflow.dtypes import F32, PRED, S32, U8
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.graph.scalars import identity
from tpuflow.lower.operations.blocks import Loads, blocks, interleaved, load_all
from tpuflow.lower.operations.forms import UnsupportedForm
from tpuflow.lower.operations.reductions import total
from tpuflow.lower.operations.window import Sizes, SlidingWindow, WindowDimension

REDUCTIONS = {"ge": "max", "le": "min"}
"""The comparison that selects an element -> the reduction of the pooling."""


class _Axis(WindowDimension):
    """One axis of undilated windows."""

    __slots__ = ()

    def inside(self, k: int) -> range:
        """The range of windows whose position k holds an element, rather than padding."""
        first, last = (max(0, -(-(edge + self.low - k) // self.stride)) for edge in (0, self.size))
        return range(first, min(last, self.out))

    def shares(self, phase: int) -> dict[int, int]:
        """For the elements at the positions p of one phase of the stride: window position -> first window, for windows that hold p.

        Elements of a phase lie `stride` apart, as the windows do; with stride 1 the first element is the first of the operand.
        """
        first = self.low if self.stride == 1 else phase
        return {k: (first - k) // self.stride for k in range(self.window) if (first - k) % self.stride == 0}

    @property
    def origin(self) -> int:
        """Where the first element of phase 0 lies in the operand."""
        return 0 if self.stride == 1 else -self.low

    @property
    def count(self) -> int:
        """Elements of one phase."""
        return blocks(self.size + (self.low if self.stride > 1 else 0), self.stride)


def _axes(shape: Sizes, window: SlidingWindow) -> list[_Axis]:
    """The axes of a window.

    Raises:
      UnsupportedForm: it is dilated.
    """
    if {*window.base_dilation, *window.window_dilation} - {1}:
        raise UnsupportedForm("dilated windows")
    return window.axes(shape, _Axis)


def _counts(axes: Sequence[_Axis]) -> list[int]:
    return [a.out for a in axes]


def _cut(b: Builder, x: Value, axes: Sequence[_Axis], counts: Sizes, fill: int | float) -> list[Value]:
    """For each position within a window, the elements of windows 0 .. count - 1 there; `fill` outside of x."""
    loads = [Loads(tuple(k - a.low for k in range(a.window)), n, a.stride) for a, n in zip(axes, counts, strict=True)]
    return [part for _, part in load_all(b, x, loads, fill)]


def _inside(b: Builder, axes: Sequence[_Axis], place: Sequence[int], counts: Sizes) -> Value | None:
    """Which windows have an element at a position (pred); None if all do."""
    found = None
    for at, (axis, k, count) in enumerate(zip(axes, place, counts, strict=True)):
        mask = _mask(b, axis, k, count)
        if mask is not None:
            along = b.broadcast(mask, counts, (at,))
            found = along if found is None else b.and_(found, along)
    return found


def _mask(b: Builder, axis: _Axis, k: int, count: int) -> Value | None:
    """Which of windows 0 .. count - 1 have an element at position k (those that do not exist have nothing to lose): pred [count]."""
    inside = axis.inside(k)
    if inside == range(min(axis.out, count)):
        return None
    number = b.iota(TensorType(S32, (count,)), 0)
    mask = b.ge(number, inside.start)
    if inside.stop < min(axis.out, count):
        mask = b.and_(mask, b.lt(number, inside.stop))
    cut = inside.start > axis.out or inside.stop < axis.out
    return b.or_(mask, b.ge(number, axis.out)) if cut and axis.out < count else mask


def _winner(b: Builder, axes: Sequence[_Axis], operand: Value, select: str, counts: Sizes) -> Value:
    """The number of the position within each window that `select` picks: the first of equal ones, never padding.

    What is outside is filled as the pooling itself fills it, so that one kernel that makes both loads every position once.
    """
    values = _cut(b, operand, axes, counts, identity(REDUCTIONS[select], operand.dtype))
    places = list(itertools.product(*(range(a.window) for a in axes)))
    keep = b.ge if select == "ge" else b.le
    best, winner = values[0], b.full(TensorType(U8 if len(places) <= 256 else S32, tuple(counts)), 0)
    chosen = _inside(b, axes, places[0], counts)  # None: every window has chosen
    for i in range(1, len(places)):
        inside = _inside(b, axes, places[i], counts)
        better = b.not_(keep(best, values[i]))
        if chosen is not None:
            better = b.or_(b.not_(chosen), better)
            chosen = None if inside is None else b.or_(chosen, inside)
        if inside is not None:
            better = b.and_(inside, better)
        best, winner = b.select(better, values[i], best), b.select(better, b.full_like(winner, i), winner)
    return winner


def select_and_scatter(b: Builder, source: Value, operand: Value, select: str, window: SlidingWindow, *, op: str = "add") -> Value:
    """Every element gets the sources of the windows that it won, combined by `op` (what reductions have, with an identity of 0) in the
    order of its places in them; sums of narrow floats are in f32.

    Where no element is in two windows, the winners are found in the same kernel; else they are kept in memory, a byte each.
    """
    if not (source.type.elems and operand.type.elems):
        return b.full_like(operand, 0)
    axes = _axes(operand.shape, window)
    operand = b.convert(operand, U8) if operand.dtype == PRED else operand
    overlap = any(a.window > a.stride or (a.stride == 1 and a.low) for a in axes)
    counts = [a.out if overlap else a.count for a in axes]
    winner = _winner(b, axes, operand, select, counts)
    phases = list(itertools.product(*(range(a.stride) for a in axes)))
    pieces = [_gathered(b, op, axes, source, winner, phase, overlap=overlap) for phase in phases]
    origins = [[a.origin + p for a, p in zip(axes, phase, strict=True)] for phase in phases]
    return b.convert(interleaved(b, pieces, origins, [a.stride for a in axes], operand.shape), source.dtype)


def _gathered(b: Builder, op: str, axes: Sequence[_Axis], source: Value, winner: Value, phase: Sizes, *, overlap: bool) -> Value:
    """The gradient of the elements of one phase of the stride."""
    shape = tuple(a.count for a in axes)
    dtype = F32 if overlap and source.dtype.is_float else source.dtype
    shares = [a.shares(p) for a, p in zip(axes, phase, strict=True)]
    if not all(shares):
        return b.full(TensorType(dtype, shape), 0)
    loads = [Loads(tuple(dict.fromkeys(s.values())), n) for s, n in zip(shares, shape, strict=True)]
    given = dict(load_all(b, source, loads, 0))
    won = dict(load_all(b, winner, loads, 0)) if overlap else {(0,) * len(axes): winner}
    terms = []
    for place in itertools.product(*shares):
        at = tuple(s[k] for s, k in zip(shares, place, strict=True))
        number = sum(k * math.prod(a.window for a in axes[i + 1 :]) for i, k in enumerate(place))
        terms.append(b.select(b.eq(won[at], number), b.convert(given[at], dtype), 0))
    return total(b, op, terms)


def select_and_gather_add(b: Builder, tangents: Value, operand: Value, select: str, window: SlidingWindow) -> Value:
    """The tangent at the position that won each window (`select`: ge or le)."""
    axes = _axes(operand.shape, window)
    counts = _counts(axes)
    if 0 in counts or not operand.type.elems:
        return b.full(TensorType(tangents.dtype, tuple(counts)), 0)
    winner = _winner(b, axes, operand, select, counts)
    result, *others = _cut(b, tangents, axes, counts, 0)
    for i, value in enumerate(others, 1):
        result = b.select(b.eq(winner, i), value, result)
    return result
