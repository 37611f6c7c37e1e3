"""Reductions by any function, of several arrays at once (values with their places): written with JAX's own operations, then inlined.

A reducer is a jaxpr on scalars, n accumulated and n new ones -> n. It is applied to whole arrays, halves of them or the elements of all
windows at one place, in an order that the shapes alone decide.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from tpuflow.lower.frontend.jax_compat import ClosedJaxpr, jaxpr_as_fun, opened
from tpuflow.lower.frontend.jaxpr import inline
from tpuflow.lower.frontend.registry import UnsupportedForm
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value

Sizes = Sequence[int]
Arrays = Sequence[Any]
MOST_PLACES = 1024
"""Elements of a window that a Program has an operation each for."""


def reduce_by(b: Builder, jaxpr: Any, operands: Sequence[Value], axes: Sizes) -> tuple[Value, ...]:
    """Arrays and their starting scalars, reduced over `axes` in a halving tree; the starting values come first."""

    def reduced(*values: Any) -> Arrays:
        arrays, starts = _halves(values)
        kept = [i for i in range(arrays[0].ndim) if i not in axes]
        shape = tuple(arrays[0].shape[i] for i in kept)
        rows = [lax.transpose(a, (*axes, *kept)).reshape(-1, *shape) for a in arrays]  # [reduced, *kept]
        spread = [lax.broadcast(s, shape) for s in starts]
        apply = _on_arrays(jaxpr)
        while rows[0].shape[0] > 1:
            half = rows[0].shape[0] // 2
            first, second, odd = ([r[low:high] for r in rows] for low, high in ((0, half), (half, 2 * half), (2 * half, None)))
            rows = [lax.concatenate([y, o], 0) for y, o in zip(apply(*first, *second), odd, strict=True)]
        return apply(*spread, *(r.reshape(shape) for r in rows)) if rows[0].shape[0] else spread

    return _inlined(b, reduced, operands)


def reduce_window_by(
    b: Builder, jaxpr: Any, operands: Sequence[Value], windows: Sizes, strides: Sizes, padding: Sequence[Sizes], base_dilation: Sizes,
    window_dilation: Sizes,
) -> tuple[Value, ...]:  # fmt: skip
    """Arrays and their starting scalars; each window's elements one after the other, the last axis fastest.

    Raises:
      UnsupportedForm: windows of more than MOST_PLACES elements.
    """
    if math.prod(windows) > MOST_PLACES:
        raise UnsupportedForm(f"windows of {math.prod(windows)} elements; a reducer that is no sum or extreme takes at most {MOST_PLACES}")

    def reduced(*values: Any) -> Arrays:
        arrays, starts = _halves(values)
        pads = [(low, high, spread - 1) for (low, high), spread in zip(padding, base_dilation, strict=True)]
        padded = [lax.pad(a, s, pads) for a, s in zip(arrays, starts, strict=True)]
        spans = [(w - 1) * d + 1 for w, d in zip(windows, window_dilation, strict=True)]
        out = [max(0, (n - span) // step + 1) for n, span, step in zip(padded[0].shape, spans, strides, strict=True)]
        found: Arrays = [lax.broadcast(s, out) for s in starts]
        if 0 in out:
            return found
        apply = _on_arrays(jaxpr)
        for place in itertools.product(*map(range, windows)):
            first = [p * d for p, d in zip(place, window_dilation, strict=True)]
            last = [f + (n - 1) * step + 1 for f, n, step in zip(first, out, strides, strict=True)]
            found = apply(*found, *(lax.slice(a, first, last, strides) for a in padded))
        return found

    return _inlined(b, reduced, operands)


def _halves(values: Arrays) -> tuple[Arrays, Arrays]:
    return values[: len(values) // 2], values[len(values) // 2 :]


def _on_arrays(jaxpr: Any) -> Callable[..., Arrays]:
    """The reducer, element by element of arrays of one shape."""
    scalar = jaxpr_as_fun(ClosedJaxpr(*opened(jaxpr)))

    def apply(*arrays: Any) -> Arrays:
        function = scalar
        for _ in range(arrays[0].ndim):
            function = jax.vmap(function)
        return function(*arrays)

    return apply


def _inlined(b: Builder, function: Callable[..., Arrays], operands: Sequence[Value]) -> tuple[Value, ...]:
    specs = [jax.ShapeDtypeStruct(v.shape, v.dtype.numpy) for v in operands]
    with jax.disable_jit(False):
        return inline(b, jax.make_jaxpr(function)(*specs), operands)
