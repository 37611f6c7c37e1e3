"""Elementwise operations that are short compositions of what the device has as instructions."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from tpuflow.dtypes import F32, PRED, S32, U8, U32, DType
from tpuflow.dtypes import from_numpy as dtype_of
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.operations.forms import UnsupportedForm


def aligned(b: Builder, *operands: Value) -> tuple[Value, ...]:
    """Operands of one shape: 0-d ones (literals) are splat, axes of size 1 stretched."""
    if all(x.shape == operands[0].shape for x in operands):
        return operands
    shape = np.broadcast_shapes(*(x.shape for x in operands))
    return tuple(b.broadcast(x, shape, range(len(x.shape))) for x in operands)


def in_f32(operation: Callable[..., Value]) -> Callable[..., Value]:
    """A composition of several steps, for f16 and bf16 computed in f32 and rounded once at the end."""

    @functools.wraps(operation)
    def wide(b: Builder, *operands: Value) -> Value:
        dtype = operands[0].dtype
        return b.convert(operation(b, *(b.convert(x, F32) for x in operands)), dtype)

    return wide


def compare(b: Builder, direction: str, x: Value, y: Value) -> Value:
    """x and y compared, pred; truth values are ordered as the numbers 0 and 1. `direction`: eq, ne, lt, le, gt or ge."""
    x, y = (b.convert(v, U8) if v.dtype == PRED else v for v in aligned(b, x, y))
    return b.emit("compare", (x, y), {"direction": direction}).result


def compare_in_total_order(b: Builder, direction: str, x: Value, y: Value) -> Value:
    """As `compare`, floats in the order of their bits: -NaN < -inf < ... < -0 < 0 < ... < inf < NaN."""
    return compare(b, direction, *(ordered_bits(b, v) if v.dtype.is_float else v for v in aligned(b, x, y)))


def maximum(b: Builder, x: Value, y: Value) -> Value:
    """The larger of two; NaN if one is."""
    x, y = aligned(b, x, y)
    return b.or_(x, y) if x.dtype == PRED else b.max(x, y)


def with_sign(b: Builder, size: Value, like: Value) -> Value:
    """size with the sign of another number; a zero of either sign is positive."""
    return b.select(b.lt(like, 0), b.neg(size), size)


def minimum(b: Builder, x: Value, y: Value) -> Value:
    """The smaller of two; NaN if one is."""
    x, y = aligned(b, x, y)
    return b.and_(x, y) if x.dtype == PRED else b.min(x, y)


def power(b: Builder, x: Value, y: Value) -> Value:
    """Floats raised to floats or integers.

    Raises:
      UnsupportedForm: x are integers.
    """
    if not x.dtype.is_float:
        raise UnsupportedForm("integers are raised to constant powers only (lax.integer_pow)")
    return b.pow(*aligned(b, x, b.convert(y, x.dtype)))


def sign(b: Builder, x: Value) -> Value:
    """x itself where it is zero or NaN."""
    return b.select(b.gt(x, 0), b.full_like(x, 1), b.select(b.lt(x, 0), b.full_like(x, -1), x))


def square(b: Builder, x: Value) -> Value:
    """x times x."""
    return b.mul(x, x)


def integer_pow(b: Builder, x: Value, *, y: int) -> Value:
    """x to the power of y by repeated squaring, multiplying in JAX's order."""
    if y == 0:
        return b.full_like(x, 1)
    power = _positive_power(b, x, abs(y))
    return b.reciprocal(power) if y < 0 else power


def _positive_power(b: Builder, x: Value, y: int) -> Value:
    if y == 3:
        return b.mul(b.mul(x, x), x)
    result: Value | None = None
    while True:
        if y & 1:
            result = x if result is None else b.mul(result, x)
        y >>= 1
        if not y:
            break
        x = b.mul(x, x)
    assert result is not None
    return result


@in_f32
def logistic(b: Builder, x: Value) -> Value:
    """1 / (1 + exp(-x)); decomposed here because no unit has it."""
    return b.reciprocal(b.add(1, b.exp(b.neg(x))))


def clamp(b: Builder, low: Value, x: Value, high: Value) -> Value:
    """x between low and high; high if they cross."""
    low, x, high = aligned(b, low, x, high)
    return minimum(b, maximum(b, x, low), high)


def select_n(b: Builder, which: Value, *cases: Value) -> Value:
    """cases[which]; a number below 0 takes the first, one beyond the last the last."""
    which = b.splat(which, cases[0].shape) if which.shape == () else which
    if which.dtype == PRED:
        return cases[0] if len(cases) == 1 else b.select(which, cases[1], cases[0])
    result = cases[-1]
    for i in reversed(range(len(cases) - 1)):
        result = b.select(b.le(which, i), cases[i], result)
    return result


def reduce_precision(b: Builder, x: Value, *, exponent_bits: int, mantissa_bits: int) -> Value:
    """Round the bits of the f32 value to fewer mantissa bits (nearest even), then saturate its exponent to the smaller range."""
    wide = b.convert(x, F32)
    bits = b.bitcast(wide, U32)
    if mantissa_bits < 23:
        bits = _round_mantissa(b, bits, 23 - mantissa_bits)
    if exponent_bits < 8:
        bits = _saturate_exponent(b, bits, 127, (1 << exponent_bits - 1) - 1)
    return b.convert(b.select(b.ne(wide, wide), wide, b.bitcast(bits, F32)), x.dtype)


def _round_mantissa(b: Builder, bits: Value, dropped: int) -> Value:
    odd = b.and_(b.shr_logical(bits, dropped), 1)
    rounded = b.add(bits, b.add(odd, (1 << dropped - 1) - 1))
    return b.and_(rounded, -(1 << dropped))


def _saturate_exponent(b: Builder, bits: Value, bias: int, smaller_bias: int) -> Value:
    exponent, sign = b.and_(bits, 0x7F800000), b.and_(bits, 1 << 31)
    bits = b.select(b.gt(exponent, bias + smaller_bias << 23), b.or_(sign, 0x7F800000), bits)
    return b.select(b.le(exponent, bias - smaller_bias << 23), sign, bits)


WORDS: dict[int, DType] = {1: U8, 2: dtype_of("uint16"), 4: U32}


def bitcast_convert(b: Builder, x: Value, dtype: DType) -> Value:
    """The same bits; between widths a last axis holds the narrow parts, lowest first."""
    if PRED in (x.dtype, dtype):
        return b.convert(x, dtype)
    if min(x.dtype.bits, dtype.bits) < 8:
        return _bitcast_of_parts(b, x, dtype)
    old, new = x.dtype.bytes, dtype.bytes
    words = b.bitcast(x, WORDS[old])
    if old > new:
        words = _split_words(b, words, WORDS[new])
    elif old < new:
        words = _join_words(b, words, WORDS[new])
    return b.bitcast(words, dtype)


def _bitcast_of_parts(b: Builder, x: Value, dtype: DType) -> Value:
    """Bits of numbers of less than a byte, or as such: by way of 32-bit words of as many bits."""
    old, new = x.dtype.bits, dtype.bits
    words = b.convert(x, U32) if old < 8 else b.convert(b.bitcast(x, WORDS[x.dtype.bytes]), U32)
    words = b.and_(words, (1 << old) - 1) if old < 32 else words
    if old > new:
        parts = [b.convert(b.shr_logical(words, new * i), dtype) for i in range(old // new)]
        return b.concatenate([b.reshape(p, (*x.shape, 1)) for p in parts], len(x.shape))
    if old < new:
        axis = len(x.shape) - 1
        parts = [b.reshape(b.slice_axis(words, axis, i, i + 1), x.shape[:-1]) for i in range(new // old)]
        words = functools.reduce(b.or_, (b.shl(p, old * i) for i, p in enumerate(parts)))
    return b.convert(words, dtype) if new < 8 else b.bitcast(b.convert(words, WORDS[dtype.bytes]), dtype)


def _split_words(b: Builder, x: Value, narrow: DType) -> Value:
    """[...] -> [..., parts]."""
    parts = [b.shr_logical(x, 8 * narrow.bytes * i) for i in range(x.dtype.bytes // narrow.bytes)]
    stacked = [b.reshape(b.convert(b.and_(p, (1 << 8 * narrow.bytes) - 1), narrow), (*x.shape, 1)) for p in parts]
    return b.concatenate(stacked, len(x.shape))


def _join_words(b: Builder, x: Value, wide: DType) -> Value:
    """[..., parts] -> [...]."""
    axis = len(x.shape) - 1
    parts = (b.reshape(b.slice_axis(x, axis, i, i + 1), x.shape[:-1]) for i in range(x.shape[axis]))
    shifted = [b.shl(b.convert(p, wide), 8 * x.dtype.bytes * i) for i, p in enumerate(parts)]
    return functools.reduce(b.or_, shifted)


def nextafter(b: Builder, x: Value, y: Value) -> Value:
    """One step of x's bits towards y: decided on the bits, so that subnormals count. In types without -0 its bits are those of NaN."""
    x, y = aligned(b, x, y)
    word = WORDS[x.dtype.bytes]
    top = 1 << 8 * word.bytes - 1
    x_bits, y_bits = b.bitcast(x, word), b.bitcast(y, word)
    x_size, y_size = b.and_(x_bits, top - 1), b.and_(y_bits, top - 1)
    opposed = b.ne(b.and_(x_bits, top), b.and_(y_bits, top))
    inwards = b.or_(opposed, b.gt(x_size, y_size))
    step = b.select(inwards, b.sub(x_bits, 1), b.add(x_bits, 1))
    if not np.signbit(np.array(-0.0, np.float32).astype(x.dtype.numpy)):
        step = b.select(b.eq(step, top), 0, step)
    step = b.select(b.eq(x_size, 0), b.or_(b.and_(y_bits, top), 1), step)
    both_zero = b.and_(b.eq(x_size, 0), b.eq(y_size, 0))
    result = b.bitcast(b.select(b.or_(b.eq(x_bits, y_bits), both_zero), y_bits, step), x.dtype)
    nan = b.or_(*(b.ne(wide, wide) for wide in (b.convert(z, z.dtype.computed) for z in (x, y))))
    return b.select(nan, b.full_like(x, float("nan")), result)


def ordered_bits(b: Builder, x: Value) -> Value:
    """A float's bits as an integer in total order: -NaN < -inf < ... < -0 < 0 < ... < inf < NaN."""
    word = dtype_of(f"int{8 * x.dtype.bytes}")
    bits = b.bitcast(x, word)
    return b.xor(bits, b.shr_logical(b.shr_arithmetic(bits, 8 * word.bytes - 1), 1))


def as_index(b: Builder, x: Value) -> Value:
    """An integer as s32; unsigned values too large for it become the largest."""
    limited = b.min(x, (1 << 31) - 1) if x.dtype == U32 else x
    return b.convert(limited, S32)
