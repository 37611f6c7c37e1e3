"""The device's arithmetic in NumPy, for the reference engine: a value is an array of its dtype's own NumPy type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tpuflow.dtypes import BF16, S32, DType
from tpuflow.errors import ProgramError
from tpuflow.isa.contraction import Contraction
from tpuflow.isa.elementwise import BINARY, COMPARE, OPERATIONS, UNARY
from tpuflow.isa.numpy_matmul import matmul, patches
from tpuflow.isa.numpy_rounding import Array, bf16_to_f32, f32_to_bf16, from_f32, from_storage, narrow, splat, to_storage, widen


def identity(op: str, dtype: DType) -> int | float | bool:
    """What changes nothing when combined by `op`: -0 for float addition."""
    if dtype.kind == "pred":
        return op in ("and", "min")
    if op in ("max", "min") and not dtype.is_float:
        limits = np.iinfo(dtype.numpy)
        return int(limits.min if op == "max" else limits.max)
    table = {"add": -0.0, "mul": 1, "max": -np.inf, "min": np.inf, "and": -1, "or": 0, "xor": 0}
    return table[op] if dtype.is_float else int(table[op])


def is_defined(op: str, dtype: DType) -> bool:
    """Whether an elementwise operation has a meaning on a type."""
    return dtype.kind in OPERATIONS[op].on


def undefined(op: str, dtype: DType) -> ProgramError:
    """The error for an elementwise operation that has no meaning on a type."""
    arity, table = ("unary", UNARY) if op in UNARY else ("binary", BINARY)
    there = ", ".join(name for name in table if is_defined(name, dtype))
    return ProgramError(f"{op!r} is not defined on {dtype}; {arity} operations on it: {there}")


class NumpyArithmetic:
    """Implements `tpuflow.isa.arithmetic.Arithmetic`; see there."""

    def load(self, stored: Array, dtype: DType) -> Array:
        """The array itself."""
        return stored

    def store(self, value: Array, dtype: DType) -> Array:
        """The array itself."""
        return value

    def full(self, shape: tuple[int, ...], value: int | float | bool, dtype: DType) -> Array:
        """A splat; subnormal values stay."""
        return np.full(shape, splat(value, dtype), dtype.numpy)

    def iota(self, shape: tuple[int, ...], axis: int, start: Any, dtype: DType) -> Array:
        """Positions along an axis."""
        positions = (int(start) + np.arange(shape[axis])).astype(np.int32)
        along = positions.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        return np.broadcast_to(self.convert(along, S32, dtype), shape).copy()

    def unary(self, op: str, a: Array, dtype: DType) -> Array:
        """An operation of `isa.elementwise.UNARY`."""
        return _apply(op, (a,), dtype)

    def is_finite(self, a: Array, dtype: DType) -> Array:
        """Neither infinite nor NaN."""
        if dtype.is_float:
            return np.asarray(np.isfinite(bf16_to_f32(a) if dtype == BF16 else a))
        return np.ones(a.shape, np.bool_)

    def binary(self, op: str, a: Array, b: Array, dtype: DType) -> Array:
        """An operation of `isa.elementwise.BINARY`."""
        return _apply(op, (a, b), dtype)

    def compare(self, op: str, a: Array, b: Array, dtype: DType) -> Array:
        """A comparison of `isa.elementwise.COMPARE`."""
        if dtype.is_float:
            a, b = widen(a, dtype), widen(b, dtype)
        return np.asarray(COMPARE[op].function(a, b))

    def select(self, pred: Array, on_true: Array, on_false: Array, dtype: DType) -> Array:
        """Bits of one or the other."""
        return np.where(pred, on_true, on_false)

    def convert(self, a: Array, from_dtype: DType, to_dtype: DType) -> Array:
        """Values in another type."""
        with np.errstate(all="ignore"):
            return np.asarray(_convert(a, from_dtype, to_dtype))

    def bitcast(self, a: Array, from_dtype: DType, to_dtype: DType) -> Array:
        """Bits as another type."""
        return a != 0 if to_dtype.kind == "pred" else a.view(to_dtype.numpy)

    def broadcast(self, a: Array, shape: tuple[int, ...], axes: Sequence[int]) -> Array:
        """A stretched copy."""
        sizes = dict(zip(axes, a.shape, strict=True))
        order = sorted(range(a.ndim), key=lambda i: axes[i])
        aligned = a.transpose(order).reshape([sizes.get(i, 1) for i in range(len(shape))])
        return np.broadcast_to(aligned, shape).copy()

    def transpose(self, a: Array, permutation: Sequence[int]) -> Array:
        """Axes in another order."""
        return a.transpose(permutation).copy()

    def concatenate(self, values: Sequence[Array], axis: int) -> Array:
        """One after the other."""
        return np.concatenate(values, axis)

    def reduce(self, op: str, start: Array, a: Array, axes: Sequence[int], block: int, dtype: DType) -> Array:
        """Halving trees, block after block."""
        kept = [axis for axis in range(a.ndim) if axis not in axes]
        along = a.transpose(*axes, *kept).reshape(-1, *(a.shape[axis] for axis in kept)) if a.size else a[:0]  # [n, kept...]
        total = start.copy()
        for first in range(0, len(along), block):
            total = self.binary(op, total, self._halve(op, along[first : first + block], dtype).reshape(start.shape), dtype)
        return total

    def _halve(self, op: str, a: Array, dtype: DType) -> Array:
        """[n, ...] -> [1, ...]."""
        n = a.shape[0]
        size = 1 << (n - 1).bit_length()
        if size > n:
            a = np.concatenate([a, self.full((size - n, *a.shape[1:]), identity(op, dtype), dtype)])
        while size > 1:
            size //= 2
            a = self.binary(op, a[:size], a[size:], dtype)
        return a

    def cumulative(self, op: str, carry: Array, a: Array, axis: int, dtype: DType) -> tuple[Array, Array]:
        """A running combination, left to right."""
        last = np.moveaxis(carry, axis, 0)[0]
        values = []
        for row in np.moveaxis(a, axis, 0):
            last = self.binary(op, last, row, dtype)
            values.append(last)
        stacked = np.stack(values, axis) if values else a
        return stacked, np.expand_dims(last, axis)

    def sort(self, operands: Sequence[Array], dtypes: Sequence[DType], axis: int, keys: int, count: int) -> tuple[Array, ...]:
        """The first `count` of all operands in the order of the first `keys`."""
        order = np.lexsort([_sort_key(x, t) for x, t in zip(operands[:keys], dtypes, strict=False)][::-1], axis=axis)
        first = order.take(range(count), axis)
        return tuple(np.take_along_axis(x, first, axis) for x in operands)

    def patches(self, a: Array, axis: int, outer: int, inner: int, stride: int, dilation: int) -> Array:
        """Two axes for one, as a view."""
        return patches(a, axis, outer, inner, stride, dilation)

    def positions(self, shape: Sequence[int], axis: int) -> Array:
        """Positions along an axis, as a view."""
        along = np.arange(shape[axis], dtype=np.int32).reshape([-1 if i == axis else 1 for i in range(len(shape))])
        return np.broadcast_to(along, shape)

    def matmul(
        self, a: Array, b: Array, contraction: Contraction, dtype: DType, acc_dtype: DType,
        a_mask: Array | None = None, b_mask: Array | None = None,
    ) -> Array:  # fmt: skip
        """One K-tile of the matrix unit."""
        with np.errstate(all="ignore"):
            return matmul(a, b, contraction, dtype, acc_dtype, a_mask, b_mask).copy()


def _apply(op: str, operands: tuple[Array, ...], dtype: DType) -> Array:
    if not is_defined(op, dtype):
        raise undefined(op, dtype)
    with np.errstate(all="ignore"):
        return np.asarray(OPERATIONS[op].on[dtype.kind](*operands, dtype=dtype))


def _sort_key(x: Array, dtype: DType) -> Array:
    """Integers that order as the values do: -0 as 0, NaN above all."""
    if not dtype.is_float:
        return x
    wide = widen(x, dtype)
    bits = np.where(wide == 0, np.int32(0), wide.view(np.int32))
    ordered = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)
    return np.where(np.isnan(wide), np.int32(0x7FC00000), ordered)


def _convert(a: Array, from_dtype: DType, to_dtype: DType) -> Array:
    if from_dtype == to_dtype:
        return a
    if from_dtype.wide is not None:
        return _convert(from_storage(a, from_dtype), from_dtype.wide, to_dtype)
    if to_dtype.wide is not None:
        return to_storage(a, from_dtype, to_dtype)
    if from_dtype.is_float:
        return _from_float(a, from_dtype, to_dtype)
    if to_dtype.is_float:
        return narrow(a.astype(np.float64), to_dtype)
    return a != 0 if to_dtype.kind == "pred" else a.astype(to_dtype.numpy)


def _from_float(a: Array, from_dtype: DType, to_dtype: DType) -> Array:
    if to_dtype.kind == "pred":
        return widen(a, from_dtype) != 0
    wide = bf16_to_f32(a) if from_dtype == BF16 else a.astype(np.float32)
    if to_dtype == BF16:
        return f32_to_bf16(wide)
    if to_dtype.is_float:
        return from_f32(wide, to_dtype)
    limits = np.iinfo(to_dtype.numpy)
    bounded = np.clip(np.trunc(wide.astype(np.float64)), limits.min, limits.max)
    return np.where(np.isnan(bounded), 0, bounded).astype(np.int64).astype(to_dtype.numpy)
