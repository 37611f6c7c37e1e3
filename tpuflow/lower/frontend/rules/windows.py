"""Rules of pooling: windowed reductions and their gradients, by strided slices, one per window position."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from tpuflow.dtypes import F32, PRED, S32
from tpuflow.lower.frontend.registry import UnsupportedForm, lowers
from tpuflow.lower.frontend.rules.reductions import accumulator, combine, cumulative, monoid, reduce, total
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.graph.scalars import identity

Sizes = Sequence[int]
Padding = Sequence[tuple[int, int]]
_MOST_SLICES = 16  # a longer window is reduced piece by piece instead


@lowers("reduce_window_sum")
def _reduce_window_sum(
    b: Builder, x: Value, *, window_dimensions: Sizes, window_strides: Sizes, padding: Padding, base_dilation: Sizes,
    window_dilation: Sizes,
) -> Value:  # fmt: skip
    return _reduce_window(b, "add", x, window_dimensions, window_strides, padding, base_dilation, window_dilation)


@lowers("reduce_window_max")
def _reduce_window_max(
    b: Builder, x: Value, *, window_dimensions: Sizes, window_strides: Sizes, padding: Padding, base_dilation: Sizes,
    window_dilation: Sizes,
) -> Value:  # fmt: skip
    return _reduce_window(b, "max", x, window_dimensions, window_strides, padding, base_dilation, window_dilation)


@lowers("reduce_window_min")
def _reduce_window_min(
    b: Builder, x: Value, *, window_dimensions: Sizes, window_strides: Sizes, padding: Padding, base_dilation: Sizes,
    window_dilation: Sizes,
) -> Value:  # fmt: skip
    return _reduce_window(b, "min", x, window_dimensions, window_strides, padding, base_dilation, window_dilation)


@lowers("reduce_window")
def _reduce_window_by_jaxpr(
    b: Builder, *arrays: Value, jaxpr: Any, window_dimensions: Sizes, window_strides: Sizes, padding: Padding, base_dilation: Sizes,
    window_dilation: Sizes,
) -> Value:  # fmt: skip
    if len(arrays) != 2:
        raise UnsupportedForm("one array is reduced at a time")
    x, start = arrays
    op = monoid(jaxpr)
    reduced = _reduce_window(b, op, x, window_dimensions, window_strides, padding, base_dilation, window_dilation)
    return combine(b, op, b.splat(start, reduced.shape), reduced)


def _reduce_window(
    b: Builder, op: str, x: Value, windows: Sizes, strides: Sizes, padding: Padding, base_dilation: Sizes, dilations: Sizes
) -> Value:
    """One axis after the other: a window of w x h takes w + h slices, not w x h."""
    if (scan := _as_cumulative(x.shape, windows, strides, padding, base_dilation)) is not None:
        axis, backwards = scan
        return cumulative(b, op, x, axis, reverse=backwards)
    wide = b.convert(x, accumulator(op, x.dtype))
    low, high = ([p[side] for p in padding] for side in (0, 1))
    wide = b.pad(wide, _identity(op, wide), low, high, [d - 1 for d in base_dilation])
    for axis, (window, stride, dilation) in enumerate(zip(windows, strides, dilations, strict=True)):
        wide = _reduce_axis(b, op, wide, axis, window, stride, dilation)
    return b.convert(wide, x.dtype)


def _identity(op: str, x: Value) -> bool | int | float:
    if x.dtype == PRED:
        return op in ("min", "and", "mul")
    return identity(op, x.dtype)


def _as_cumulative(shape: Sizes, windows: Sizes, strides: Sizes, padding: Padding, base_dilation: Sizes) -> tuple[int, bool] | None:
    """(axis, from the end) if the windows are all prefixes, or all suffixes, of one axis: a window as long as the axis, one side padded."""
    long = [i for i, w in enumerate(windows) if w > 1]
    if len(long) != 1 or {*strides, *base_dilation} != {1} or windows[long[0]] != shape[long[0]]:
        return None
    (axis,) = long
    if any(p != (0, 0) for i, p in enumerate(map(tuple, padding)) if i != axis):
        return None
    sides = {(shape[axis] - 1, 0): False, (0, shape[axis] - 1): True}
    backwards = sides.get((padding[axis][0], padding[axis][1]))
    return None if backwards is None else (axis, backwards)


def _reduce_axis(b: Builder, op: str, x: Value, axis: int, window: int, stride: int, dilation: int) -> Value:
    if window == 1 and stride == 1:
        return x
    reach = (window - 1) * dilation + 1
    out = max(0, (x.shape[axis] - reach) // stride + 1)
    if out == 0:
        return b.slice_axis(x, axis, 0, 0)
    if window <= max(out, _MOST_SLICES) and out > 1:
        last = (out - 1) * stride + 1
        return total(b, op, [b.slice_axis(x, axis, k * dilation, k * dilation + last, stride) for k in range(window)])
    pieces = [b.slice_axis(x, axis, o * stride, o * stride + reach, dilation) for o in range(out)]
    shape = [1 if i == axis else n for i, n in enumerate(x.shape)]
    return b.concatenate([b.reshape(reduce(b, op, piece, (axis,)), shape) for piece in pieces], axis)


# --- gradients of pooling by a maximum or minimum ---------------------------------------------------------------------


def _offsets(windows: Sizes) -> Iterator[tuple[int, ...]]:
    """Window positions in row-major order."""
    return itertools.product(*map(range, windows))


class _Windows:
    """The slices of a padded operand, one for each window position; `outs` is their shape."""

    def __init__(self, b: Builder, shape: Sizes, windows: Sizes, strides: Sizes, padding: Padding) -> None:
        self.b, self.windows, self.strides = b, windows, strides
        self.low, self.high = ([p[side] for p in padding] for side in (0, 1))
        self.padded = [n + lo + hi for n, lo, hi in zip(shape, self.low, self.high, strict=True)]
        self.outs = [(n - w) // s + 1 for n, w, s in zip(self.padded, windows, strides, strict=True)]

    def cut(self, x: Value, fill: bool | int | float) -> list[Value]:
        """What every window has at each of its positions; `fill` outside x."""
        padded = self.b.pad(x, fill, self.low, self.high)
        return [self._slice(padded, offset) for offset in _offsets(self.windows)]

    def _slice(self, padded: Value, offset: Sizes) -> Value:
        limit = [o + (n - 1) * s + 1 for o, n, s in zip(offset, self.outs, self.strides, strict=True)]
        return self.b.slice(padded, offset, limit, self.strides)

    def spread(self, x: Value, offset: Sizes) -> Value:
        """The reverse of one slice: window values laid at their places in the operand, zero elsewhere."""
        low = [o - lo for o, lo in zip(offset, self.low, strict=True)]
        reach = [(n - 1) * s + 1 for n, s in zip(self.outs, self.strides, strict=True)]
        high = [n - hi - r - o for n, hi, r, o in zip(self.padded, self.high, reach, offset, strict=True)]
        return self.b.pad(x, 0, low, high, [s - 1 for s in self.strides])

    @property
    def overlap(self) -> bool:
        """Whether an element may lie in several windows."""
        return any(w > s for w, s in zip(self.windows, self.strides, strict=True))


def _winner(b: Builder, at: _Windows, operand: Value, select: str) -> Value:
    """Number of the window position that `select` keeps (s32): the first of equal ones, never one in the padding."""
    values = at.cut(operand, 0)
    inside = at.cut(b.full(TensorType(PRED, operand.shape), True), False) if any((*at.low, *at.high)) else None
    keep = b.ge if select == "ge" else b.le
    best, place = values[0], b.full(TensorType(S32, values[0].shape), 0)
    chosen = inside[0] if inside else None
    for i, value in enumerate(values[1:], 1):
        better = b.not_(keep(best, value))
        if inside and chosen:
            better = b.and_(inside[i], b.or_(b.not_(chosen), better))
            chosen = b.or_(chosen, inside[i])
        best, place = b.select(better, value, best), b.select(better, b.full_like(place, i), place)
    return place


@lowers("select_and_scatter_add")
def _select_and_scatter_add(
    b: Builder, source: Value, operand: Value, *, select_prim: Any, window_dimensions: Sizes, window_strides: Sizes, padding: Padding
) -> Value:
    """Every window's source value goes to the position that won it; sums of narrow floats are kept in f32."""
    if not (source.type.elems and operand.type.elems):
        return b.full_like(operand, 0)
    at = _Windows(b, operand.shape, window_dimensions, window_strides, padding)
    place = _winner(b, at, operand, select_prim.name)
    wide = b.convert(source, F32 if at.overlap and source.dtype.is_float else source.dtype)
    shares = (b.select(b.eq(place, i), wide, 0) for i in range(math.prod(window_dimensions)))
    spread = [at.spread(share, offset) for share, offset in zip(shares, _offsets(window_dimensions), strict=True)]
    return b.convert(total(b, "add", spread), source.dtype)


@lowers("select_and_gather_add")
def _select_and_gather_add(
    b: Builder, tangents: Value, operand: Value, *, select_prim: Any, window_dimensions: Sizes, window_strides: Sizes, padding: Padding,
    base_dilation: Sizes, window_dilation: Sizes,
) -> Value:  # fmt: skip
    """The tangent at the position that won each window."""
    if {*base_dilation, *window_dilation} - {1}:
        raise UnsupportedForm("dilated windows")
    at = _Windows(b, operand.shape, window_dimensions, window_strides, padding)
    if 0 in at.outs or not operand.type.elems:
        return b.full(TensorType(tangents.dtype, tuple(at.outs)), 0)
    place = _winner(b, at, operand, select_prim.name)
    result, *others = at.cut(tangents, 0)
    for i, value in enumerate(others, 1):
        result = b.select(b.eq(place, i), value, result)
    return result
