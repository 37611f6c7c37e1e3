"""Reductions in whatever order XLA:CPU is quickest in: native f32, integers, predicates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from tpuflow.device.fast.lax_rounding import turned

Value = Any
Combine = Callable[[Value, Value], Value]

_PIECES, _MOST_PIECES = 8, 16
"""Into how many pieces the rows of a column are cut, at most: of what is computed as it is combined, and of what is only loaded."""
_LEAST_ELEMS = 2**16
_FEW_ROWS, _FEW_ELEMS = 32, 2**10
_WINDOW = 32
_ROW_ELEMS = 1024
"""The most elements that are added one after the other."""
_ROWS, _COLUMNS = 128, 256
"""The least of which a product with ones sums columns."""
_EXTREMES: dict[str, tuple[Combine, str, str]] = {"max": (lax.max, "max", "min"), "min": (lax.min, "min", "max")}
"""(how integers are combined; which of their limits stands for NaN, which is the identity)."""


def reduced(a: Value, axes: Sequence[int], combine: Combine, nothing: Any, *, products: bool = False, pieces: int = _PIECES) -> Value:
    """`a` with `axes` reduced to length 1; nothing: the identity of `combine`, a scalar of its type. products: these are f32 sums, and may
    be +0 where all is -0, as those of products with ones are. pieces: into how many a column is cut at most.
    """
    return reduced_together([a], axes, combine, nothing, products=products, pieces=pieces)[0]


def reduced_together(
    values: Sequence[Value], axes: Sequence[int], combine: Combine, nothing: Any, *, products: bool = False, pieces: int = _PIECES
) -> list[Value]:
    """`reduced` of several arrays of one shape. What is computed for several of them as they are combined is computed once.

    One axis at a time, adjacent axes merged: XLA:CPU takes up to 14 times as long to reduce several axes in one loop, in which it adds all
    elements one after the other.
    """
    shape = values[0].shape
    lengths, along = _neighbours_as_one(shape, axes)
    found = [lax.reshape(a, lengths) for a in values]
    for axis in reversed(along):
        cut = _in_pieces(found, axis, combine, nothing, pieces)
        found = [_along(a, axis, combine, nothing, products=products, written=cut is not found) for a in cut]
    return [lax.reshape(a, [1 if axis in axes else n for axis, n in enumerate(shape)]) for a in found]


def column_sums(a: Value, axes: Sequence[int]) -> Value | None:
    """The sums of an f32 array that is in memory, by a product with ones; None if these are not columns, or too few or too many elements.

    They are +0 where all is -0. It takes 0.10 ms for [1024, 768] and 0.016 for [256, 256], where `reduced` takes 0.12 and 0.019, and is two
    operations to compile, not 23; of fewer columns it is slower, 0.032 instead of 0.024 for [1024, 128]. What is computed as it is summed
    would have to be written to memory first.
    """
    lengths, along = _neighbours_as_one(a.shape, axes)
    if len(lengths) != 2 or along != [0] or not _ROWS <= lengths[0] <= _ROW_ELEMS or lengths[1] < _COLUMNS:
        return None
    return _times_ones(a.reshape(lengths)).reshape([1 if axis in axes else n for axis, n in enumerate(a.shape)])


def two_rows(first: float, n: int) -> Value:
    """f32[2, n], a constant: a row of this number, and another that is not to be read. For a product with one row XLA:CPU compiles a loop,
    for two it calls YNNPACK's, and were they equal it would compile a kernel that writes them."""
    return np.stack([np.full(n, first, np.float32), np.full(n, 1 - first, np.float32)])


@custom_vmap
def _product_with_ones(a: Value) -> Value:
    """[..., rows, columns] -> [..., columns]."""
    *lanes, rows, _ = a.shape
    each, place = tuple(range(len(lanes))), len(lanes)
    ones = lax.broadcast_in_dim(two_rows(1, rows), (*lanes, 2, rows), (place, place + 1))
    sums = lax.dot_general(ones, a, (((place + 1,), (place,)), (each, each)))
    return lax.index_in_dim(sums, 0, place, keepdims=False)


@_product_with_ones.def_vmap
def _(axis_size: int, batched: Sequence[bool], a: Value) -> tuple[Value, bool]:
    return _product_with_ones(a), True  # `vmap` would make lanes columns, and XLA:CPU transpose them


_times_ones = jax.jit(_product_with_ones, inline=True)
"""Traced once for each shape: the rule for `vmap` makes a trace of its own in every call."""


def extreme(op: str, a: Value, axes: Sequence[int], *, moved: bool = False) -> Value:
    """`reduced` of f32, or of bf16 as s16 words, by "max" or "min", which hand on NaN and take +0 to be above -0, as that of integers in
    the floats' order. moved: nothing computes or converts `a`, whose columns are then cut into more pieces: 0.12 ms instead of 0.15 for
    bf16[2048, 1024], but twice the time where f16 is widened first.

    LLVM makes vectors of these, and of what they are computed from. A maximum of floats that hands on NaN it computes number by number,
    and roundings with it: 2.6 ms instead of 0.4 for the rows of [6144, 128] in bf16.
    """
    combine, nan, nothing = _EXTREMES[op]
    bits = lax.bitcast_convert_type(a, jnp.int32) if a.dtype == jnp.float32 else a
    ordered, limits = turned(bits), jnp.iinfo(bits.dtype)
    is_nan = lax.ne(a, a) if bits is not a else lax.gt(bits & np.int16(0x7FFF), jnp.full_like(bits, 0x7F80))
    keys = lax.select(is_nan, jnp.full_like(ordered, getattr(limits, nan)), ordered)
    found = turned(reduced(keys, axes, combine, bits.dtype.type(getattr(limits, nothing)), pieces=_MOST_PIECES if moved else _PIECES))
    return lax.bitcast_convert_type(found, a.dtype)


def _along(a: Value, axis: int, combine: Combine, nothing: Any, *, products: bool = False, written: bool = False) -> Value:
    """`a` with one axis reduced; written: it is in memory. XLA:CPU reduces rows (the last axis) in vector registers; long rows are reduced
    in pieces, so that sums lose no digits. It reduces columns one element after the other, except in windows, where it takes a row of
    columns at once: 16 rows of [160, 768] in 0.02 ms instead of 0.16."""
    n = a.shape[axis]
    if axis < a.ndim - 1:
        a = _in_windows(a, axis, combine, nothing, products=products, written=written)
    elif n > _ROW_ELEMS and (piece := max(k for k in range(1, _ROW_ELEMS + 1) if n % k == 0)) > _WINDOW:
        a = _along(a.reshape(*a.shape[:-1], n // piece, piece), a.ndim, combine, nothing)
    return lax.squeeze(a, (axis,)) if a.shape[axis] == 1 else lax.reduce(a, nothing, combine, (axis,))


def _in_windows(a: Value, axis: int, combine: Combine, nothing: Any, *, products: bool, written: bool) -> Value:
    """`a` with windows of the axis reduced, again and again until it is short; with `products` the last window by one with ones."""
    products = products and math.prod(a.shape[:axis]) == 1
    few = _PIECES if a.size >= _FEW_ELEMS else _WINDOW
    while (n := a.shape[axis]) > (1 if products and written else few):
        if products and n <= _WINDOW:
            return _times_ones(a.reshape(n, -1)).reshape([1 if i == axis else length for i, length in enumerate(a.shape)])
        window = tuple(min(n, _WINDOW) if i == axis else 1 for i in range(a.ndim))
        a, written = lax.reduce_window(a, nothing, combine, window, window, "SAME"), True
    return a


def _in_pieces(values: Sequence[Value], axis: int, combine: Combine, nothing: Any, most: int) -> Sequence[Value]:
    """Arrays with the axis, unless it is the last, cut into a few pieces, which are combined elementwise.

    XLA:CPU fuses this into the loop that computes them, which are then never written to memory: sums of differences and their squares take
    2 ms instead of 7 for [51200, 64], 2.5 instead of 34 for [204800, 32]. LLVM writes the loop over up to 8 pieces out, and makes vectors;
    16 of a longer computation it does not: sums of gradients of GELU take twice the time. Small reductions of one array gain nothing. If
    the axis has few rows, such as those of a batch, but more than 8, each row is a piece: XLA:CPU would go down each column and compute its
    elements one by one, 20 us instead of 5 for 32 rows of 128 in a trip of a GRU's gradient. A reduction along the last axis is fused with
    what computes it as it is; in pieces it takes as long, and three times as long to compile.

    Several arrays go into one loop: the two sums of a batch norm's gradient take 0.23 ms instead of 0.38 for [2048, 256], 0.03 instead of
    0.04 for [72, 256], and one kernel to compile.
    """
    a, several = values[0], len(values) > 1
    n = a.shape[axis]
    if axis == a.ndim - 1:
        return values
    if not several and _PIECES < n <= _FEW_ROWS and _FEW_ELEMS <= a.size < _LEAST_ELEMS:
        return [_halved([lax.slice_in_dim(a, k, k + 1, axis=axis) for k in range(n)], combine)]
    pieces = max(k for k in range(1, most + 1) if n % k == 0) if n else 1
    if pieces == 1 or (not several and (n < 2 * _PIECES or a.size < _LEAST_ELEMS)):
        return values
    cut = [a.reshape(*a.shape[:axis], pieces, n // pieces, *a.shape[axis + 1 :]) for a in values]
    return lax.reduce(cut, [nothing] * len(cut), lambda x, y: [*map(combine, x, y)], (axis,))


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
