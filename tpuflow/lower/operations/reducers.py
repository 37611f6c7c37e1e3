"""Reductions by an arbitrary reducer, of several arrays at once (values with their indices, say).

A reducer maps n accumulated and n new arrays of one shape, elementwise, to n arrays. It is applied to whole arrays (halves of the operand,
or one position of all windows) in an order that depends on shapes only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.operations.forms import Body, UnsupportedForm
from tpuflow.lower.operations.window import Sizes, SlidingWindow, WindowDimension

MOST_PLACES = 1024
"""Limit on the elements of a window: each is an operation of the Program."""


def reduce_by(b: Builder, body: Body, operands: Sequence[Value], starts: Sequence[Value], axes: Sizes) -> tuple[Value, ...]:
    """Arrays reduced over `axes` in a halving tree; their starting values ([]) come first."""
    whole = operands[0].shape
    kept = [i for i in range(len(whole)) if i not in axes]
    shape, count = tuple(whole[i] for i in kept), math.prod(whole[i] for i in axes)
    rows = [b.reshape(b.transpose(x, (*axes, *kept)), (count, *shape)) for x in operands]
    spread = tuple(b.splat(s, shape) for s in starts)
    while (count := rows[0].shape[0]) > 1:
        half = count // 2
        first, second, odd = ([b.slice_axis(r, 0, *cut) for r in rows] for cut in ((0, half), (half, 2 * half), (2 * half, count)))
        rows = [b.concatenate([y, o], 0) for y, o in zip(body(b, *first, *second), odd, strict=True)]
    return tuple(body(b, *spread, *(b.reshape(r, shape) for r in rows))) if count else spread


def reduce_window_by(
    b: Builder, body: Body, operands: Sequence[Value], starts: Sequence[Value], window: SlidingWindow
) -> tuple[Value, ...]:
    """Each window's elements one after the other, the last axis fastest, after the starting values ([]).

    Raises:
      UnsupportedForm: windows of more than MOST_PLACES elements.
    """
    w = window
    if math.prod(w.sizes) > MOST_PLACES:
        raise UnsupportedForm(f"windows of {math.prod(w.sizes)} elements; a reducer that is no sum or extreme takes at most {MOST_PLACES}")
    axes = w.axes(operands[0].shape, WindowDimension)
    low, high, interior = ([a.low for a in axes], [a.high for a in axes], [a.base_dilation - 1 for a in axes])
    padded = [b.pad(x, s, low, high, interior) for x, s in zip(operands, starts, strict=True)]
    out = [a.out for a in axes]
    found: Sequence[Value] = [b.splat(s, out) for s in starts]
    for place in itertools.product(*map(range, w.sizes)) if 0 not in out else ():
        first = [k * a.window_dilation for k, a in zip(place, axes, strict=True)]
        last = [f + (a.out - 1) * a.stride + 1 for f, a in zip(first, axes, strict=True)]
        found = body(b, *found, *(b.slice(x, first, last, w.strides) for x in padded))
    return tuple(found)
