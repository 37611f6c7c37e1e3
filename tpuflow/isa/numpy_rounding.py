"""Rounding to the device's float types in NumPy: subnormal flush, canonical NaN, one rounding from float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tpuflow.dtypes import BF16, F16, F32, DType

MIN_NORMAL = np.float32(2.0**-126)
# x86 and IEEE 754 (tininess after rounding) write zero for a result whose 24-bit rounding, exponent unbounded, is below 2^-126; the
# tie 2^-126 - 2^-151 rounds up to even and stays.
_TINY = 2.0**-126 - 2.0**-151

Array = np.ndarray[Any, Any]


def flush(x: Array) -> Array:
    """f32 values with subnormals replaced by zeros of the same sign."""
    small = np.abs(x) < MIN_NORMAL
    return np.where(small, np.copysign(np.float32(0), x), x) if small.any() else x


def canonical(x: Array) -> Array:
    """Float values of any type with every NaN replaced by the canonical quiet one."""
    nan = np.isnan(x)
    return np.where(nan, x.dtype.type(np.nan), x) if nan.any() else x


def widen(x: Array, dtype: DType) -> Array:
    """Float values as f32 (exact; f32 and bf16 subnormals read as zero)."""
    if dtype == F16:
        return x.astype(np.float32)
    return flush(x if dtype == F32 else bf16_to_f32(x))


def bf16_to_f32(x: Array) -> Array:
    """The same values, bit for bit."""
    return np.left_shift(x.view(np.uint16).astype(np.uint32), 16, dtype=np.uint32).view(np.float32)


def f32_to_bf16(x: Array) -> Array:
    """Nearest even on the bits (subnormals are kept), NaN canonical."""
    bits = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded.astype(np.uint16)).view(ml_dtypes.bfloat16)


def from_f32(x: Array, dtype: DType) -> Array:
    """f32 values, rounded once to a float type; NaN canonical."""
    if dtype == BF16:
        return f32_to_bf16(x)
    return canonical(x.astype(dtype.numpy))


def narrow(x: Array, dtype: DType) -> Array:
    """float64 results rounded once to a float type: f32 and bf16 results that are subnormal become zero, NaN canonical."""
    if dtype == F16:
        return canonical(x.astype(np.float16))
    if dtype == BF16:
        x = round_to_odd(x)
    rounded = x.astype(np.float32)
    tiny = np.abs(x) < _TINY
    if tiny.any():
        rounded = np.where(tiny, np.copysign(np.float32(0), rounded), rounded)
    return from_f32(rounded, dtype)


def round_to_odd(x: Array) -> Array:
    """float64 cut to f32's 24 bits, the last one set if anything was cut off: rounding that to fewer bits is one rounding of x."""
    bits = np.ascontiguousarray(x).view(np.uint64).reshape(x.shape)
    cut = bits & np.uint64(0x1FFFFFFF)
    odd = (bits ^ cut) | ((cut != 0).astype(np.uint64) << np.uint64(29))
    return odd.view(np.float64)


def from_storage(x: Array, dtype: DType) -> Array:
    """Numbers of a type of kind storage in the type that they are computed in: exact, NaN canonical."""
    wide = x.astype(dtype.computed.numpy)
    return canonical(wide) if dtype.computed.is_float else wide


def to_storage(x: Array, from_dtype: DType, dtype: DType) -> Array:
    """Numbers in a type of kind storage: floats rounded once to nearest even, what is too large as the type has it (an infinity, or NaN);
    integers from floats truncated and saturated, NaN 0, from integers the low bits."""
    if dtype.computed.is_float:
        return canonical(x.astype(np.float64 if from_dtype.is_integer else np.float32)).astype(dtype.numpy)
    if not from_dtype.is_float:
        return x.astype(np.int64).astype(dtype.numpy)
    limits = ml_dtypes.iinfo(dtype.numpy)
    bounded = np.clip(np.trunc(x.astype(np.float64)), int(limits.min), int(limits.max))
    return np.where(np.isnan(bounded), 0, bounded).astype(np.int64).astype(dtype.numpy)


def splat(value: int | float | bool, dtype: DType) -> Array:
    """A 0-d array: `value` rounded once to `dtype`; subnormals stay, integers wrap."""
    if dtype.wide is not None:
        with np.errstate(all="ignore"):
            return to_storage(np.array(value, np.float64 if dtype.wide.is_float else np.int64), dtype.wide, dtype)
    if dtype.is_float:
        exact = np.array(float(value), np.float64)
        with np.errstate(over="ignore"):
            return f32_to_bf16(round_to_odd(exact).astype(np.float32)) if dtype == BF16 else canonical(exact.astype(dtype.numpy))
    if dtype.kind == "pred":
        return np.array(bool(value))
    return np.array(int(value) & 0xFFFFFFFF, np.uint32).astype(dtype.numpy)
