"""Helpers of all factorisations: batches of real or complex matrices [B, M, N], their rows, columns and blocks, masks and loops."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from tpuflow.dtypes import F32, S32, DType
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.operations import loops
from tpuflow.lower.operations.complex import Complex, Number, packed, planes
from tpuflow.lower.operations.gather import gather
from tpuflow.lower.operations.linalg.arithmetic import N, concatenate, conj, each
from tpuflow.lower.operations.rows import SliceAxes

BLOCK = 128
"""Columns of a panel, which are factored one by one; the trailing matrix is updated by products. XLA's expanders use 128 as well."""


def batched(*ranks: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate an operation on arrays with one batch axis, f32 or complex, so that it takes any number of batch axes and any float type.

    ranks: the number of axes of each operand that are not batch axes. Results get the batch axes of the first operand in front; f32 results
    are converted to its type if that is real.
    """

    def decorate(operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def on_batches(b: Builder, *operands: Number, **options: Any) -> Any:
            shape = operands[0].shape
            batch, dtype = shape[: len(shape) - ranks[0]], F32 if isinstance(operands[0], Complex) else operands[0].dtype
            flat = [each(functools.partial(_flattened, b, rank), x) for x, rank in zip(operands, ranks, strict=True)]
            results = operation(b, *flat, **options)
            several = results if isinstance(results, tuple) else (results,)
            restored = tuple(each(functools.partial(_restored, b, batch, dtype), y) for y in several)
            return restored if isinstance(results, tuple) else restored[0]

        return on_batches

    return decorate


def _flattened(b: Builder, rank: int, x: Value) -> Value:
    cut = len(x.shape) - rank
    return b.convert(b.reshape(x, (math.prod(x.shape[:cut]), *x.shape[cut:])), F32)


def _restored(b: Builder, batch: Sequence[int], dtype: DType, x: Value) -> Value:
    return b.reshape(b.convert(x, dtype) if x.dtype == F32 else x, (*batch, *x.shape[1:]))


def repeat(
    b: Builder, body: Callable[..., Sequence[Number]], trips: int, carries: Sequence[Number], invariants: Sequence[Number] = ()
) -> tuple[Any, ...]:
    """The carries after `trips` runs of body(builder, trip, *invariants, *carries) -> carries, where trip (s32[]) counts from 0."""
    types = [x.type for x in (*invariants, *carries)]

    def step(b: Builder, trip: Value, *arrays: Value) -> list[Value]:
        return planes(body(b, trip, *packed(arrays, types)))

    found = loops.scan(b, step, trips, planes(invariants), planes(carries), (), (), numbered=True)
    return packed(found, [x.type for x in carries])


def transposed(b: Builder, x: N) -> N:
    """[B, M, N] -> [B, N, M]."""
    return each(lambda x: b.transpose(x, (0, 2, 1)), x)


def adjoint(b: Builder, x: N) -> N:
    """[B, M, N] -> [B, N, M], conjugated."""
    return conj(b, transposed(b, x))


def iota_along(b: Builder, like: Number, axis: int) -> Value:
    """s32 of the shape of `like`: every element's position along an axis."""
    return b.iota(TensorType(S32, like.shape), axis)


def broadcast_like(b: Builder, x: N, like: Number) -> N:
    """x broadcast to the shape of `like`; it is 0-d, or has as many axes, each as long as that of `like` or of size 1."""
    return each(lambda x: b.splat(x, like.shape) if x.shape == () else b.broadcast(x, like.shape, range(3)), x)


def column(b: Builder, x: N, j: Value) -> N:
    """x[:, :, j] as [B, M, 1]."""
    zero = b.scalar(0, S32)
    return each(lambda x: b.dynamic_slice(x, (zero, zero, j), (*x.shape[:2], 1)), x)


def row(b: Builder, x: N, j: Value) -> N:
    """x[:, j, :] as [B, 1, N]."""
    zero = b.scalar(0, S32)
    return each(lambda x: b.dynamic_slice(x, (zero, j, zero), (x.shape[0], 1, x.shape[2])), x)


def with_column(b: Builder, x: N, new: Number, j: Value) -> N:
    """x with `new` [B, M, 1] as its column j."""
    zero = b.scalar(0, S32)
    return each(lambda x, new: b.dynamic_update_slice(x, new, (zero, zero, j)), x, new)


def with_row(b: Builder, x: N, new: Number, j: Value) -> N:
    """x with `new` [B, 1, N] as its row j."""
    zero = b.scalar(0, S32)
    return each(lambda x, new: b.dynamic_update_slice(x, new, (zero, j, zero)), x, new)


def take_rows(b: Builder, x: N, order: Value) -> N:
    """Rows order[b, i] of x[b]: x is [B, M, N], order s32[B, K], the result [B, K, N]."""
    axes = SliceAxes(window=(2,), collapsed=(1,), indexed=(1,), operand_batching=(0,), indices_batching=(0,))
    places = b.reshape(order, (*order.shape, 1))
    return each(lambda x: gather(b, x, places, axes, (1, 1, x.shape[2])), x)


def sum_along(b: Builder, x: N, axis: int) -> N:
    """x summed over an axis, which is kept with size 1 (NumPy's keepdims)."""
    shape = tuple(1 if i == axis else n for i, n in enumerate(x.shape))
    return each(lambda x: b.reshape(b.reduce("add", x, (axis,)), shape), x)


def diagonal(b: Builder, x: N) -> N:
    """[B, N, N] -> [B, N, 1]."""
    return sum_along(b, masked(b, b.eq(iota_along(b, x, 1), iota_along(b, x, 2)), x), 2)


def masked(b: Builder, where: Value, x: N) -> N:
    """x where `where` holds, else 0."""
    return each(lambda x: b.select(where, x, 0), x)


def submatrix(b: Builder, x: N, rows: tuple[int, int], columns: tuple[int, int]) -> N:
    """x[:, rows[0]:rows[1], columns[0]:columns[1]]."""
    return each(lambda x: b.slice(x, (0, rows[0], columns[0]), (x.shape[0], rows[1], columns[1])), x)


def triangle(b: Builder, x: N, *, lower: bool, diagonal: int = 0) -> N:
    """The lower or the upper triangle of x, zeros elsewhere, as jnp.tril and jnp.triu; `diagonal` counts to the right."""
    rows, columns = b.add(iota_along(b, x, 1), diagonal), iota_along(b, x, 2)
    return masked(b, b.ge(rows, columns) if lower else b.le(rows, columns), x)


def identity(b: Builder, batch: int, rows: int, columns: int) -> Value:
    """Ones on the diagonal, [B, M, N]."""
    zeros = b.full(TensorType(F32, (batch, rows, columns)), 0)
    return b.select(b.eq(iota_along(b, zeros, 1), iota_along(b, zeros, 2)), b.full_like(zeros, 1), zeros)


def block_matrix(b: Builder, blocks: Sequence[Sequence[Number]]) -> Number:
    """The matrix of these blocks, given row by row, as numpy.block."""
    return concatenate(b, [concatenate(b, line, 2) for line in blocks], 1)
