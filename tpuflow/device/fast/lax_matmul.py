"""The matrix unit's sum in lax: bit-exact (float64, ascending, rounded once) and native (XLA's f32 dot)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.device.fast.lax_rounding import Rounding, widen, x64
from tpuflow.dtypes import F32, DType
from tpuflow.isa.numpy_matmul import SLACK, Labels

Value = Any
Axes = Sequence[int]

_CHUNK = 16


def matmul(rounding: Rounding, a: Value, b: Value, a_axes: Axes, b_axes: Axes, out_axes: Axes, dtype: DType, acc: DType) -> Value:
    """See `Arithmetic.matmul`; operands are carriers."""
    labels = Labels.of(a_axes, b_axes, out_axes)
    if not dtype.is_float:
        product = _modular(a, b, _dimensions(labels, a_axes, b_axes), acc)
    elif rounding.bitexact:
        product = _ordered(rounding, widen(a, dtype), widen(b, dtype), labels, a_axes, b_axes)
    else:
        numbers = _dimensions(labels, a_axes, b_axes)
        product = lax.dot_general(widen(a, dtype), widen(b, dtype), numbers, preferred_element_type=jnp.float32)
    order = (*labels.batch, *(x for x in a_axes if x in labels.rows), *(x for x in b_axes if x in labels.columns))
    return lax.transpose(product, [order.index(x) for x in out_axes])


def _dimensions(labels: Labels, a_axes: Axes, b_axes: Axes) -> tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]:
    """XLA's dot dimension numbers."""
    a, b = list(a_axes), list(b_axes)
    return (
        ([a.index(x) for x in labels.contracted], [b.index(x) for x in labels.contracted]),
        ([a.index(x) for x in labels.batch], [b.index(x) for x in labels.batch]),
    )


def _modular(a: Value, b: Value, numbers: Any, acc: DType) -> Value:
    """Integers modulo 2^32; s8 and s16 operands go to XLA as they are, it has faster loops for them."""
    if a.dtype.kind == "u":
        a, b = lax.convert_element_type(a, jnp.int32), lax.convert_element_type(b, jnp.int32)
    return lax.convert_element_type(lax.dot_general(a, b, numbers, preferred_element_type=jnp.int32), acc.numpy)


def _arranged(x: Value, axes: Axes, groups: Sequence[Axes]) -> Value:
    """x with its axes brought into groups, each flattened to one axis."""
    index = {label: i for i, label in enumerate(axes)}
    shape = [int(np.prod([x.shape[index[label]] for label in group], dtype=int)) for group in groups]
    return lax.reshape(lax.transpose(x, [index[label] for group in groups for label in group]), shape)


def _ordered(rounding: Rounding, a: Value, b: Value, labels: Labels, a_axes: Axes, b_axes: Axes) -> Value:
    """f32 operands -> f32 product, the float64 sums taken in ascending order of the contracted positions.

    XLA's float64 dot adds in an order of its own (it depends on shapes, layouts and threads). Products of two f32 are exact in float64
    and two orders of adding K terms differ by at most 2 (K - 1) u sum|a b| <= 2 (K - 1) u |a| |b|, so nearly every sum rounds to the
    same f32 in any order; the others are found by that bound and added again in ascending order.
    """
    rows = tuple(x for x in a_axes if x in labels.rows)
    columns = tuple(x for x in b_axes if x in labels.columns)
    terms = int(np.prod([a.shape[list(a_axes).index(x)] for x in labels.contracted], dtype=int))
    with x64():
        a, b = lax.convert_element_type(a, jnp.float64), lax.convert_element_type(b, jnp.float64)
        product = lax.dot_general(a, b, _dimensions(labels, a_axes, b_axes))
        squares_a, squares_b = _squares(a, a_axes, labels), _squares(b, b_axes, labels)
        shape = _three(product.shape, len(labels.batch), len(rows))
        sums = lax.reshape(product, shape) + np.float64(0)  # [B, M, N]; -0 + 0 = +0, as a sum that starts from zero
        result = rounding.narrow(sums, F32)
        if terms > 1 and result.size:
            size = lax.reshape(squares_a, (*shape[:2], 1)) * lax.reshape(squares_b, (shape[0], 1, shape[2]))
            doubtful = _doubtful(rounding, sums, lax.sqrt(size) * np.float64(SLACK * terms))

            def operands() -> tuple[Value, Value]:
                left = _arranged(a, a_axes, (labels.contracted, labels.batch, rows))  # [K, B, M]
                return left, _arranged(b, b_axes, (labels.batch, columns, labels.contracted))  # [B, N, K]

            result = _mended(rounding, result, doubtful, operands)
        return lax.reshape(rounding.hide(result), product.shape)


def _three(shape: Sequence[int], batch: int, rows: int) -> tuple[int, int, int]:
    """[batch..., rows..., columns...] as sizes of three axes."""
    parts = (shape[:batch], shape[batch : batch + rows], shape[batch + rows :])
    return tuple(int(np.prod(p, dtype=int)) for p in parts)  # type: ignore[return-value]


def _squares(x: Value, axes: Axes, labels: Labels) -> Value:
    """Sums of squares over the contracted axes, axes in the order [batch, free]."""
    contracted = [i for i, label in enumerate(axes) if label in labels.contracted]
    left = [label for label in axes if label not in labels.contracted]
    sums = lax.reduce(x * x, np.float64(0), lax.add, contracted)
    order = [*labels.batch, *(label for label in left if label not in labels.batch)]
    return lax.transpose(sums, [left.index(label) for label in order])


def _doubtful(rounding: Rounding, sums: Value, slack: Value) -> Value:
    """Where f32 rounding does not give the same bits all over sums +- slack."""
    low, high = (lax.bitcast_convert_type(rounding.narrow(x, F32), jnp.int32) for x in (sums - slack, sums + slack))
    return lax.ne(low, high) & lax.is_finite(sums)


def _mended(rounding: Rounding, result: Value, doubtful: Value, operands: Callable[[], tuple[Value, Value]]) -> Value:
    """`result` [B, M, N] with the doubtful places summed again: each trip takes the first one of every row."""

    def body(state: tuple[Value, Value]) -> tuple[Value, Value]:
        result, doubtful = state
        column = lax.argmax(doubtful, 2, jnp.int32)  # [B, M]
        left, right = operands()
        chosen = jnp.take_along_axis(right, column[:, :, None], axis=1, mode="clip")  # [B, M, K]
        sums = _ascending(left * lax.transpose(chosen, (2, 0, 1)))  # [B, M]
        here = lax.eq(lax.broadcasted_iota(jnp.int32, result.shape, 2), column[:, :, None]) & doubtful
        mended = lax.broadcast_in_dim(rounding.narrow(sums, F32), result.shape, (0, 1))
        return lax.select(here, mended, result), doubtful & ~here

    return lax.while_loop(lambda state: jnp.any(state[1]), body, (result, doubtful))[0]


def _ascending(terms: Value) -> Value:
    """float64 [K, ...] summed over axis 0, one term after the other (zeros added at the end change nothing)."""
    missing = -terms.shape[0] % _CHUNK
    terms = lax.pad(terms, np.float64(0), [(0, missing, 0), *((0, 0, 0) for _ in terms.shape[1:])])
    chunks = lax.reshape(terms, (terms.shape[0] // _CHUNK, _CHUNK, *terms.shape[1:]))

    def add_chunk(sums: Value, chunk: Value) -> tuple[Value, None]:
        for i in range(_CHUNK):
            sums = sums + chunk[i]
        return sums, None

    return lax.scan(add_chunk, jnp.zeros(terms.shape[1:], jnp.float64), chunks)[0]
