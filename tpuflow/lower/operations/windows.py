"""Windowed reductions: a short window is combined element by element, each a strided load of the whole operand.

Slices and pads say what is loaded; `FoldMoves` makes windows of them, so that a reduction is one kernel and nothing is moved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from tpuflow.dtypes import PRED
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.graph.scalars import identity
from tpuflow.lower.operations.blocks import Loads, blocks, interleaved, load_all
from tpuflow.lower.operations.reductions import accumulator, combine, cumulative, reduce, total
from tpuflow.lower.operations.window import Sizes, SlidingWindow, WindowDimension

_MOST_LOADS = 25  # limit of loads in one kernel, whose tiles must fit on the chip together


def reduce_window(b: Builder, op: str, x: Value, window: SlidingWindow, start: Value | None = None) -> Value:
    """The elements of every window combined; then with `start` ([]), if there is one."""
    reduced = _reduced(b, op, x, window)
    return reduced if start is None else combine(b, op, b.splat(start, reduced.shape), reduced)


def _reduced(b: Builder, op: str, x: Value, w: SlidingWindow) -> Value:
    if not x.shape:
        return x
    if (scan := as_cumulative(x.shape, w)) is not None:
        axis, backwards = scan
        return cumulative(b, op, x, axis=axis, reverse=backwards)
    axes = w.axes(x.shape, _Axis)
    if 0 in (*x.shape, *(a.out for a in axes)):
        return b.full(TensorType(x.dtype, tuple(a.out for a in axes)), _identity(op, x))
    x, axes = _without_pad(b, op, x, axes)
    return b.convert(_combined(b, op, x, axes), x.dtype)


def _identity(op: str, x: Value) -> bool | int | float:
    if x.dtype == PRED:
        return op in ("min", "and", "mul")
    return identity(op, x.dtype)


def as_cumulative(shape: Sizes, w: SlidingWindow) -> tuple[int, bool] | None:
    """(axis, from the end) if the windows are all prefixes, or all suffixes, of one axis: a window as long as the axis, one side padded."""
    long = [i for i, n in enumerate(w.sizes) if n > 1]
    if len(long) != 1 or {*w.strides, *w.base_dilation, *w.window_dilation} != {1} or w.sizes[long[0]] != shape[long[0]]:
        return None
    (axis,) = long
    if any(pad != (0, 0) for i, pad in enumerate(w.padding) if i != axis):
        return None
    backwards = {(shape[axis] - 1, 0): False, (0, shape[axis] - 1): True}.get(w.padding[axis])
    return None if backwards is None else (axis, backwards)


# --- the geometry of one axis -----------------------------------------------------------------------------------------


class _Axis(WindowDimension):
    """One axis of a windowed reduction, and the loads along it."""

    __slots__ = ()

    @property
    def side_by_side(self) -> bool:
        """Whether the windows are contiguous blocks that do not overlap."""
        return (
            (self.base_dilation, self.window_dilation, self.low) == (1, 1, 0)
            and self.stride == self.window
            and self.out * self.window <= self.size
        )

    @property
    def phases(self) -> int:
        """Kinds of windows over a base-dilated operand, by which kernel positions meet elements: window o is of the kind o % phases."""
        return self.base_dilation if self.stride == 1 and self.out > 1 else 1

    def loads(self, phase: int) -> Loads | None:
        """The loads of the windows of one phase; None if they contain no element."""
        if self.phases == 1:
            return Loads(tuple(k * self.window_dilation - self.low for k in range(self.window)), self.out, self.stride, self.base_dilation)
        places = [phase + k * self.window_dilation - self.low for k in range(self.window)]
        starts = tuple(p // self.base_dilation for p in places if p % self.base_dilation == 0)
        return Loads(starts, blocks(self.out, self.base_dilation)) if starts else None


def _without_pad(b: Builder, op: str, x: Value, axes: list[_Axis]) -> tuple[Value, list[_Axis]]:
    """Fold a pad with the identity (the gradient of a windowed sum starts with one) into the windows' own padding."""
    made = b.maker(x)
    dilated = any(a.base_dilation > 1 for a in axes)
    if dilated or made is None or made.op != "pad" or repr(b.known(made.inputs[1])) != repr(_identity(op, x)):
        return x, axes
    inner, pads = made.inputs[0], made.attrs
    rows = zip(axes, inner.shape, pads["low"], pads["high"], pads["interior"], strict=True)
    return inner, [
        replace(a, size=n, low=a.low + low, high=a.high + high, base_dilation=interior + 1) for a, n, low, high, interior in rows
    ]


# --- kernels ----------------------------------------------------------------------------------------------------------


def _combined(b: Builder, op: str, x: Value, axes: Sequence[_Axis]) -> Value:
    """In the accumulator's type: one kernel for short windows and for contiguous blocks; else one kernel per axis."""
    if math.prod(a.window for a in axes) <= _MOST_LOADS:
        return _load_by_load(b, op, x, axes)
    x = b.convert(x, accumulator(op, x.dtype))
    if all(a.side_by_side for a in axes):
        return _block_by_block(b, op, x, axes)
    for at, axis in enumerate(axes):
        alone = [axis if i == at else _Axis(n) for i, n in enumerate(x.shape)]
        x = _along(b, op, x, at, alone)
    return x


def _along(b: Builder, op: str, x: Value, at: int, axes: Sequence[_Axis]) -> Value:
    """The reduction along one axis; if windows are too long for a kernel's loads and few, window by window."""
    axis = axes[at]
    if axis.window > _MOST_LOADS and axis.side_by_side:
        return _block_by_block(b, op, x, axes)
    if axis.window <= max(axis.out, _MOST_LOADS):
        return _load_by_load(b, op, x, axes)
    reach = (axis.window - 1) * axis.window_dilation + 1
    everything = Loads((-axis.low,), (axis.out - 1) * axis.stride + reach, 1, axis.base_dilation)
    loads = [everything if i == at else Loads((0,), n) for i, n in enumerate(x.shape)]
    ((_, padded),) = load_all(b, x, loads, _identity(op, x))
    shape = [1 if i == at else n for i, n in enumerate(x.shape)]
    starts = range(0, axis.out * axis.stride, axis.stride)
    windows = [b.slice_axis(padded, at, start, start + reach, axis.window_dilation) for start in starts]
    return b.concatenate([b.reshape(reduce(b, op, window, (at,)), shape) for window in windows], at)


def _block_by_block(b: Builder, op: str, x: Value, axes: Sequence[_Axis]) -> Value:
    """Contiguous blocks become an axis of their own, which is reduced."""
    cut = b.slice(x, [0] * len(axes), [a.out * a.window for a in axes])
    return reduce(b, op, b.reshape(cut, [n for a in axes for n in (a.out, a.window)]), [2 * i + 1 for i in range(len(axes))])


def _load_by_load(b: Builder, op: str, x: Value, axes: Sequence[_Axis]) -> Value:
    """The results of all phases, interleaved."""
    phases = list(itertools.product(*(range(a.phases) for a in axes)))
    pieces = [_piece(b, op, x, axes, phase) for phase in phases]
    return interleaved(b, pieces, phases, [a.phases for a in axes], [a.out for a in axes])


def _piece(b: Builder, op: str, x: Value, axes: Sequence[_Axis], phase: Sequence[int]) -> Value:
    """The windows of one phase, whose elements are loaded in the operand's type and combined in the accumulator's."""
    wide = accumulator(op, x.dtype)
    loads = [a.loads(p) for a, p in zip(axes, phase, strict=True)]
    met = [each for each in loads if each is not None]
    if len(met) < len(loads):
        shape = tuple(blocks(a.out, a.phases) for a in axes)
        return b.full(TensorType(wide, shape), _identity(op, x))
    return total(b, op, [b.convert(part, wide) for _, part in load_all(b, x, met, _identity(op, x))])
