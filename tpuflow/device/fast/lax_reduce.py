"""Reductions in whatever order XLA:CPU is quickest in: native f32, integers, predicates."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.device.fast.lax_rounding import materialized, not_in_libraries, turned
from tpuflow.device.fast.reshapes import reshaped

Value = Any
Combine = Callable[[Value, Value], Value]

_PIECES, _MOST_PIECES = 8, 16
"""Into how many pieces the rows of a column are cut, at most: of what is computed as it is combined, and of what is only loaded."""
_LEAST_ELEMS = 2**16
_FEW_ROWS, _FEW_ELEMS = 32, 2**10
_WINDOW = 32
_LARGE_ELEMS = 2**20
_ROW_ELEMS = 1024
"""The most elements that are added one after the other."""
_EXTREMES: dict[str, tuple[Combine, str, str]] = {"max": (lax.max, "max", "min"), "min": (lax.min, "min", "max")}
"""(how integers are combined; which of their limits stands for NaN, which is the identity)."""


def summed(a: Value, axes: Sequence[int], *, from_zero: bool, in_memory: bool) -> Value:
    """Sums of f32; `axes` keep length 1. from_zero: they start from +0, else from -0, and sums of -0 are -0. in_memory: nothing
    computes `a` as it is summed.

    Those from +0 are YNNPACK's, which starts from it: as quick as loops that XLA:CPU compiles, of which `reduced` needs three for columns.
    But what is computed to be summed XLA writes for it first, more often than not. Along the last axis one loop of its own makes both, 0.34
    ms for 0.94 if [4096, 512] are maxima with 0; of large arrays the three do, 1.6 ms for 3.3 if [51200, 64] are differences and their
    squares.
    """
    lengths, along = _neighbours_as_one(a.shape, axes)
    if from_zero and (in_memory or (along[-1:] != [len(lengths) - 1] and a.size < _LARGE_ELEMS)):
        return reshaped(lax.reduce(a, np.float32(0), lax.add, axes), [1 if axis in axes else n for axis, n in enumerate(a.shape)])
    return reduced(a, axes, _added_by_xla, np.float32(0.0 if from_zero else -0.0))


def _added_by_xla(x: Value, y: Value) -> Value:
    return not_in_libraries(lax.add(x, y))


def reduced(a: Value, axes: Sequence[int], combine: Combine, nothing: Any, *, moved: bool = False) -> Value:
    """`a` with `axes` reduced to length 1. nothing: the identity of `combine`, a scalar of its type. moved: nothing computes or converts
    `a`, whose columns are then cut into more pieces, and the results again and again: 0.24 ms instead of 0.3 for s32[2048, 1024], but twice
    the time where f16 is widened first.

    One axis at a time, adjacent axes merged: XLA:CPU takes up to 14 times as long to reduce several axes in one loop, in which it adds all
    elements one after the other.
    """
    lengths, along = _neighbours_as_one(a.shape, axes)
    found = reshaped(a, lengths)
    for axis in reversed(along):
        cut = functools.partial(_in_pieces, axis=axis, combine=combine, nothing=nothing, most=_MOST_PIECES if moved else _PIECES)
        whole, found = found, cut(found)
        while moved and found is not whole and found.shape[axis] > 1:
            whole = materialized(found)
            found = cut(whole)
        found = _along(found, axis, combine, nothing)
    return reshaped(found, [1 if axis in axes else n for axis, n in enumerate(a.shape)])


def extreme(op: str, a: Value, axes: Sequence[int], *, moved: bool = False) -> Value:
    """`reduced` of f32, or of bf16 as s16 words, by "max" or "min", which hand on NaN and take +0 to be above -0, as that of integers in
    the floats' order. moved: as of `reduced`.

    LLVM makes vectors of these, and of what they are computed from. A maximum of floats that hands on NaN it computes number by number,
    and roundings with it: 2.6 ms instead of 0.4 for the rows of [6144, 128] in bf16.
    """
    combine, nan, nothing = _EXTREMES[op]
    bits = lax.bitcast_convert_type(a, jnp.int32) if a.dtype == jnp.float32 else a
    ordered, limits = turned(bits), jnp.iinfo(bits.dtype)
    is_nan = lax.ne(a, a) if bits is not a else lax.gt(bits & np.int16(0x7FFF), jnp.full_like(bits, 0x7F80))
    keys = lax.select(is_nan, jnp.full_like(ordered, getattr(limits, nan)), ordered)
    found = turned(reduced(keys, axes, combine, bits.dtype.type(getattr(limits, nothing)), moved=moved))
    return lax.bitcast_convert_type(found, a.dtype)


def _along(a: Value, axis: int, combine: Combine, nothing: Any) -> Value:
    """`a` with one axis reduced. XLA:CPU reduces rows (the last axis) in vector registers; long rows are reduced in pieces, so that sums
    lose no digits. It reduces columns one element after the other, except in windows, where it takes a row of columns at once: 16 rows of
    [160, 768] in 0.02 ms instead of 0.16."""
    n = a.shape[axis]
    if axis < a.ndim - 1:
        a = _in_windows(a, axis, combine, nothing)
    elif n > _ROW_ELEMS and (piece := max(k for k in range(1, _ROW_ELEMS + 1) if n % k == 0)) > _WINDOW:
        a = _along(a.reshape(*a.shape[:-1], n // piece, piece), a.ndim, combine, nothing)
    return lax.squeeze(a, (axis,)) if a.shape[axis] == 1 else lax.reduce(a, nothing, combine, (axis,))


def _in_windows(a: Value, axis: int, combine: Combine, nothing: Any) -> Value:
    """`a` with windows of the axis reduced, again and again until it is short."""
    few = _PIECES if a.size >= _FEW_ELEMS else _WINDOW
    while a.shape[axis] > few:
        window = tuple(min(a.shape[axis], _WINDOW) if i == axis else 1 for i in range(a.ndim))
        a = lax.reduce_window(a, nothing, combine, window, window, "SAME")
    return a


def _in_pieces(a: Value, axis: int, combine: Combine, nothing: Any, most: int) -> Value:
    """An array with the axis, unless it is the last, cut into a few pieces, which are combined elementwise.

    XLA:CPU fuses this into the loop that computes them, which are then never written to memory: sums of differences and their squares take
    2 ms instead of 7 for [51200, 64], 2.5 instead of 34 for [204800, 32]. LLVM writes the loop over up to 8 pieces out, and makes vectors;
    16 of a longer computation it does not: sums of gradients of GELU take twice the time. Small arrays gain nothing. If the axis has few
    rows, such as those of a batch, but more than 8, each row is a piece: XLA:CPU would go down each column and compute its elements one by
    one, 20 us instead of 5 for 32 rows of 128 in a trip of a GRU's gradient. A reduction along the last axis is fused with what computes it
    as it is; in pieces it takes as long, and three times as long to compile.
    """
    n = a.shape[axis]
    if axis == a.ndim - 1:
        return a
    if _PIECES < n <= _FEW_ROWS and _FEW_ELEMS <= a.size < _LEAST_ELEMS:
        return _halved([lax.slice_in_dim(a, k, k + 1, axis=axis) for k in range(n)], combine)
    pieces = max(k for k in range(1, most + 1) if n % k == 0) if n else 1
    if pieces == 1 or n < 2 * _PIECES or a.size < _LEAST_ELEMS:
        return a
    return lax.reduce(a.reshape(*a.shape[:axis], pieces, n // pieces, *a.shape[axis + 1 :]), nothing, combine, (axis,))


def _halved(found: list[Value], combine: Combine) -> Value:
    """All values combined as a balanced tree."""
    while len(found) > 1:
        found = [*map(combine, found[::2], found[1::2]), *found[len(found) // 2 * 2 :]]
    return found[0]


def _neighbours_as_one(shape: Sequence[int], axes: Sequence[int]) -> tuple[list[int], list[int]]:
    """(the shape with adjacent axes merged that are all in `axes`, or all not; the numbers of the merged axes that are in `axes`)."""
    runs = [
        (reduced, math.prod(shape[axis] for axis in run))
        for reduced, run in itertools.groupby((axis for axis, n in enumerate(shape) if n > 1), lambda axis: axis in axes)
    ]
    return [n for _, n in runs], [place for place, (reduced, _) in enumerate(runs) if reduced]
