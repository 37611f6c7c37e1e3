"""What factorisations share: batches of matrices [B, M, N] in f32, columns and rows at a place that a loop counts, masks, products."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from tpuflow.dtypes import F32, S32
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.operations import loops
from tpuflow.lower.operations.forms import Body
from tpuflow.lower.operations.gather import gather
from tpuflow.lower.operations.rows import SliceAxes

BLOCK = 128
"""Columns that are factored one after the other; the rest of the matrix meets them in products. XLA's expanders have the same."""


def batched(*ranks: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An operation on f32 arrays with one batch axis, on arrays of any type with any number of them.

    ranks: how many axes of each operand are not of the batch. Results have the batch axes in front; those in f32 take the first operand's
    type.
    """

    def decorate(operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def on_batches(b: Builder, *operands: Value, **options: Any) -> Any:
            shape = operands[0].shape
            batch, dtype = shape[: len(shape) - ranks[0]], operands[0].dtype
            flat = [_flattened(b, x, rank) for x, rank in zip(operands, ranks, strict=True)]
            results = operation(b, *flat, **options)
            several = results if isinstance(results, tuple) else (results,)
            restored = tuple(b.reshape(b.convert(y, dtype) if y.dtype == F32 else y, (*batch, *y.shape[1:])) for y in several)
            return restored if isinstance(results, tuple) else restored[0]

        return on_batches

    return decorate


def _flattened(b: Builder, x: Value, rank: int) -> Value:
    cut = len(x.shape) - rank
    return b.convert(b.reshape(x, (math.prod(x.shape[:cut]), *x.shape[cut:])), F32)


def repeat(b: Builder, body: Body, trips: int, carries: Sequence[Value], invariants: Sequence[Value] = ()) -> tuple[Value, ...]:
    """Carries after body(trip, *invariants, *carries) for trip (s32[]) = 0, 1, ..."""
    return loops.scan(b, body, trips, invariants, carries, (), (), numbered=True)


def transposed(b: Builder, x: Value) -> Value:
    """[B, M, N] -> [B, N, M]."""
    return b.transpose(x, (0, 2, 1))


def product(b: Builder, x: Value, y: Value) -> Value:
    """[B, M, K] [B, K, N] -> [B, M, N], f32 as it is."""
    return b.dot(x, y, (2,), (1,), (0,), (0,), "highest")


def place(b: Builder, like: Value, axis: int) -> Value:
    """The position along an axis of what has the shape of `like`, as s32."""
    return b.iota(TensorType(S32, like.shape), axis)


def spread(b: Builder, x: Value, like: Value) -> Value:
    """x, whose axes are of size 1 or those of `like`, or which is a number, in the shape of `like`."""
    return b.splat(x, like.shape) if x.shape == () else b.broadcast(x, like.shape, range(3))


def column(b: Builder, x: Value, j: Value) -> Value:
    """x[:, :, j] as [B, M, 1]."""
    zero = b.scalar(0, S32)
    return b.dynamic_slice(x, (zero, zero, j), (*x.shape[:2], 1))


def row(b: Builder, x: Value, j: Value) -> Value:
    """x[:, j, :] as [B, 1, N]."""
    zero = b.scalar(0, S32)
    return b.dynamic_slice(x, (zero, j, zero), (x.shape[0], 1, x.shape[2]))


def with_column(b: Builder, x: Value, new: Value, j: Value) -> Value:
    """x with `new` [B, M, 1] as its column j."""
    zero = b.scalar(0, S32)
    return b.dynamic_update_slice(x, new, (zero, zero, j))


def with_row(b: Builder, x: Value, new: Value, j: Value) -> Value:
    """x with `new` [B, 1, N] as its row j."""
    zero = b.scalar(0, S32)
    return b.dynamic_update_slice(x, new, (zero, j, zero))


def rows_at(b: Builder, x: Value, order: Value) -> Value:
    """x [B, M, N] with its rows in an order, s32[B, M]."""
    axes = SliceAxes(window=(2,), collapsed=(1,), indexed=(1,), operand_batching=(0,), indices_batching=(0,))
    return gather(b, x, b.reshape(order, (*order.shape, 1)), axes, (1, 1, x.shape[2]))


def total(b: Builder, x: Value, axis: int) -> Value:
    """x summed over an axis, which stays, of size 1."""
    shape = tuple(1 if i == axis else n for i, n in enumerate(x.shape))
    return b.reshape(b.reduce("add", x, (axis,)), shape)


def piece(b: Builder, x: Value, rows: tuple[int, int], columns: tuple[int, int]) -> Value:
    """x[:, rows[0]:rows[1], columns[0]:columns[1]]."""
    return b.slice(x, (0, rows[0], columns[0]), (x.shape[0], rows[1], columns[1]))


def triangle(b: Builder, x: Value, *, lower: bool, diagonal: int = 0) -> Value:
    """x with zeros above (lower), or below, its diagonal, or the one `diagonal` places to its right."""
    rows, columns = b.add(place(b, x, 1), diagonal), place(b, x, 2)
    return b.select(b.ge(rows, columns) if lower else b.le(rows, columns), x, 0)


def identity(b: Builder, batch: int, rows: int, columns: int) -> Value:
    """Ones on the diagonal, [B, M, N]."""
    zeros = b.full(TensorType(F32, (batch, rows, columns)), 0)
    return b.select(b.eq(place(b, zeros, 1), place(b, zeros, 2)), b.full_like(zeros, 1), zeros)


def assembled(b: Builder, blocks: Sequence[Sequence[Value]]) -> Value:
    """A matrix of blocks, given row by row."""
    return b.concatenate([b.concatenate(line, 2) for line in blocks], 1)
