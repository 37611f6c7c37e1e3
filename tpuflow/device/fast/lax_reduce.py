"""Reductions in whatever order XLA:CPU is quickest in: native f32, integers, predicates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

Value = Any
Combine = Callable[[Value, Value], Value]

_PIECES = 8
_LEAST_ELEMS = 2**16
_FEW_ROWS, _FEW_ELEMS = 32, 2**10
_WINDOW = 32
_ROW_ELEMS = 1024


def reduced(a: Value, axes: Sequence[int], combine: Combine, nothing: Any) -> Value:
    """`a` with `axes` combined to a length of 1; nothing: what changes nothing, a scalar of its type.

    Axis by axis, neighbours as one: XLA:CPU's loop over several takes up to 14 times as long as that over one, and adds all elements one
    after the other.
    """
    lengths, along = _neighbours_as_one(a.shape, axes)
    found = a.reshape(lengths)
    for axis in reversed(along):
        found = _along(_in_pieces(found, axis, combine), axis, combine, nothing)
    return found.reshape([1 if axis in axes else n for axis, n in enumerate(a.shape)])


def _along(a: Value, axis: int, combine: Combine, nothing: Any) -> Value:
    """`a` without one axis. Rows XLA:CPU takes in vectors and combines those at the end: long ones in pieces, so that sums lose no digits.
    Down columns it takes one element after the other, but a row of columns at once where they come in windows."""
    n = a.shape[axis]
    if axis < a.ndim - 1:
        a = _in_windows(a, axis, combine, nothing)
    elif n > _ROW_ELEMS and (piece := max(k for k in range(1, _ROW_ELEMS + 1) if n % k == 0)) > _WINDOW:
        a = _along(a.reshape(*a.shape[:-1], n // piece, piece), a.ndim, combine, nothing)
    return lax.reduce(a, nothing, combine, (axis,))


def _in_windows(a: Value, axis: int, combine: Combine, nothing: Any) -> Value:
    """`a` with windows of the axis combined, until there are few."""
    window = tuple(_WINDOW if i == axis else 1 for i in range(a.ndim))
    while a.shape[axis] > _WINDOW:
        a = lax.reduce_window(a, nothing, combine, window, window, "SAME")
    return a


def _in_pieces(a: Value, axis: int, combine: Combine) -> Value:
    """`a` with pieces of the axis combined, elementwise.

    XLA:CPU makes these part of the loop that computes `a`, which so is never written: it takes 7 ms to write and add up differences and
    their squares of [51200, 64], 2 ms so; 34 and 2.5 ms of [204800, 32]. More than 8 pieces XLA would not join to what makes them, and
    reductions that are small gain nothing. But a few rows, as those of a batch, are combined as rows: XLA:CPU's loop walks down each
    column, and computes all that makes it element by element: 20 us of 32 rows of 128 in a trip of a GRU's gradient, 5 so.
    """
    n = a.shape[axis]
    if n <= _FEW_ROWS and axis < a.ndim - 1 and _FEW_ELEMS <= a.size < _LEAST_ELEMS:
        return _halved([lax.slice_in_dim(a, k, k + 1, axis=axis) for k in range(n)], combine)
    pieces = max(k for k in range(1, _PIECES + 1) if n % k == 0) if n else 1
    if pieces == 1 or n < 2 * _PIECES or a.size < _LEAST_ELEMS:
        return a
    length = n // pieces
    found = [lax.slice_in_dim(a, k * length, (k + 1) * length, axis=axis) for k in range(pieces)]
    return _halved(found, combine)


def _halved(found: list[Value], combine: Combine) -> Value:
    """Neighbours combined, until there is one."""
    while len(found) > 1:
        found = [*map(combine, found[::2], found[1::2]), *found[len(found) // 2 * 2 :]]
    return found[0]


def _neighbours_as_one(shape: Sequence[int], axes: Sequence[int]) -> tuple[list[int], list[int]]:
    """(lengths where axes side by side that are all among `axes`, or all are not, are one axis; the places of the former among them)."""
    runs = [
        (reduced, math.prod(shape[axis] for axis in run))
        for reduced, run in itertools.groupby((axis for axis, n in enumerate(shape) if n > 1), lambda axis: axis in axes)
    ]
    return [n for _, n in runs], [place for place, (reduced, _) in enumerate(runs) if reduced]
