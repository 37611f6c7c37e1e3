"""Rounding to the device's float types in lax, on carriers: f32 for f32 and bf16; f16 in f32 if native, as itself if bit-exact.

XLA:CPU runs with subnormals flushed (FTZ and DAZ), which is the device's rule for f32 and bf16; what is written here is what that
leaves open. x64 mode is on only inside these functions and never leaves a 64-bit value with the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.device.fast.half import f16_to_f32, f32_to_f16
from tpuflow.dtypes import BF16, F16, F32, DType
from tpuflow.isa.numpy_rounding import from_storage, splat

Value = Any


def x64() -> Any:
    """The context in which float64 and int64 may be traced."""
    return jax.enable_x64(True)


def word_type(dtype: DType) -> np.dtype[Any]:
    """The NumPy type in whose words numbers of a type of kind storage are carried: integers as such, floats as their bits."""
    return np.dtype(np.int8 if dtype.computed.kind == "int" else np.uint8)


def in_word(x: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
    """NumPy's numbers of a type of kind storage in such words."""
    return x.view(np.uint8) if dtype.computed.is_float else from_storage(x, dtype).astype(word_type(dtype))


def flush(x: Value) -> Value:
    """f32 with subnormals replaced by zeros of the same sign, where the hardware's own flushing does not reach."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    small = lax.lt(bits & np.int32(0x7FFFFFFF), jnp.full_like(bits, 0x00800000))
    return lax.bitcast_convert_type(lax.select(small, bits & np.int32(-(2**31)), bits), jnp.float32)


def widen(x: Value, dtype: DType) -> Value:
    """A float carrier as f32, exact."""
    return f16_to_f32(x) if x.dtype == jnp.float16 else x


def widen64(x: Value, dtype: DType) -> Value:
    """A float carrier as float64, exact (subnormals of f32 and bf16 as zero); call inside `x64()`.

    The flush is written out: a compiler may drop a widening that is narrowed again, and the hardware's flush with it.
    """
    return lax.convert_element_type(flushed(x, dtype), jnp.float64)


def flushed(x: Value, dtype: DType) -> Value:
    """A float carrier as f32, subnormals of f32 and bf16 as zero."""
    return widen(x, dtype) if dtype == F16 else flush(x)


def round_to_odd(x: Value) -> Value:
    """float64 cut to 24 bits, the last one set if anything was cut off; call inside `x64()`."""
    bits = lax.bitcast_convert_type(x, jnp.uint64)
    cut = bits & np.uint64(0x1FFFFFFF)
    sticky = lax.convert_element_type(lax.ne(cut, jnp.zeros_like(cut)), jnp.uint64) << np.uint64(29)
    return lax.bitcast_convert_type((bits ^ cut) | sticky, jnp.float64)


def quiet(x: Value) -> Value:
    """f32 with the quiet bit set in every NaN: a cut to bf16 turns a NaN that has only low bits set into infinity."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    nan = lax.gt(bits & np.int32(0x7FFFFFFF), jnp.full_like(bits, 0x7F800000))
    return lax.bitcast_convert_type(lax.select(nan, bits | np.int32(0x00400000), bits), jnp.float32)


def not_in_libraries(x: Value) -> Value:
    """f32, rounded to the type that it has: no code is made for that, and XLA:CPU does not hand it to YNNPACK with what is beside it."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=23)


def started_from_zero(sums: Value) -> Value:
    """The sums if they start from +0: no sum is -0. (A select, since XLA drops the addition of a known zero.)"""
    nothing = jnp.zeros_like(sums)
    return lax.select(lax.eq(sums, nothing), nothing, sums)


def turned(bits: Value) -> Value:
    """The bits of f32 or bf16, signed, as integers with the floats' order, NaN apart; its own inverse."""
    return lax.select(lax.lt(bits, jnp.zeros_like(bits)), bits ^ jnp.iinfo(bits.dtype).max, bits)


def _rounded(x: Value, dtype: DType, *, short: bool) -> Value:
    """f32 to the nearest number of f16 or bf16, in f32. short: the last 16 bits of a NaN are zeros, as of one that arithmetic hands on from
    operands in bf16, or makes: rounded like a number it stays a NaN, and the loop takes four fifths of the time."""
    if dtype == F16:
        return _ending_in_select(f16_to_f32(f32_to_f16(x)))
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = lax.bitcast_convert_type((bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000), jnp.float32)
    return rounded if short else lax.select(lax.ne(x, x), jnp.full_like(x, np.nan), rounded)


def _ending_in_select(x: Value) -> Value:
    """f32 as it is, as the result of a select: XLA recomputes in every reader a value that ends in unary operations, but not this one.

    The select is between equal values, which XLA does not see; LLVM does, and removes it.
    """
    again = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32), jnp.float32)  # x, which XLA does not simplify
    return lax.select(lax.ne(x, x), again, x)


def materialized(x: Value, after: Sequence[Value] = ()) -> Value:
    """x, written to memory once and not recomputed in each of its readers, as XLA does with anything it could fuse into them; what reads
    the result is scheduled after what makes `after`. (The engine has XLA keep barriers to the end: `engine.COMPILER_OPTIONS`.)"""
    return lax.optimization_barrier((x, *after))[0]


@dataclass(frozen=True)
class Rounding:
    """How results are written. Bit-exact: NaN canonical, no product fused with a sum, no float constant known to the compiler.

    `zero` is an int32 0 that only run time knows: added to a result's bits, it hides where the bits come from.
    """

    bitexact: bool
    zero: Value

    def carrier_type(self, dtype: DType) -> np.dtype[Any]:
        """The NumPy type that values of `dtype` are carried in."""
        if dtype.wide is not None:
            return word_type(dtype)
        wide = dtype == BF16 or (dtype == F16 and not self.bitexact)
        return np.dtype(np.float32) if wide else dtype.numpy

    def hide(self, x: Value) -> Value:
        """f32 as it is, but XLA cannot contract the product it came from into a multiply-add (or fold it)."""
        return self.unknown(x) if self.bitexact else x

    def unknown(self, x: Value) -> Value:
        """f32 as it is, but no compiler knows what it is, or what it came from (it may, without a `zero`: outside of a Program)."""
        if self.zero is None:
            return x
        bits = lax.bitcast_convert_type(x, jnp.int32)
        return lax.bitcast_convert_type(lax.add(bits, lax.broadcast(self.zero, bits.shape)), jnp.float32)

    def hide_bits(self, bits: Value) -> Value:
        """u16 bits of bf16 as they are, but LLVM cannot move them as bf16 values, which flushes subnormals and makes NaN quiet on
        AVX512-BF16 hosts (nor can it without a `zero`: outside of a Program)."""
        if self.zero is None:
            return bits
        return lax.add(bits, lax.broadcast(lax.convert_element_type(self.zero, jnp.uint16), bits.shape))

    def canonical(self, x: Value) -> Value:
        """f32 with NaN written as the canonical one (native: as it comes).

        The NaN is a hidden one: to LLVM all NaNs are equal, so it may leave out a select between them.
        """
        if not self.bitexact:
            return x
        return lax.select(lax.ne(x, x), self.full(x.shape, np.nan, F32), x)

    def from_f32(self, x: Value, dtype: DType, *, of_own: bool = False) -> Value:
        """f32 results rounded once to a float carrier. of_own: of one operation of the hardware's on carriers of this type."""
        if not self.bitexact:
            return x if dtype == F32 else _rounded(x, dtype, short=of_own)
        x = self.canonical(x)
        if dtype == BF16:
            return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        return f32_to_f16(x) if dtype == F16 else x

    def representable(self, x: Value, dtype: DType) -> Value:
        """f32 results of which it is known that they are numbers of `dtype`, as a float carrier."""
        return self.from_f32(x, dtype) if self.bitexact else x

    def narrow(self, x: Value, dtype: DType) -> Value:
        """float64 results rounded once to a float carrier; call inside `x64()`."""
        return self.from_f32(lax.convert_element_type(x if dtype == F32 else round_to_odd(x), jnp.float32), dtype)

    def full(self, shape: tuple[int, ...], value: int | float | bool, dtype: DType) -> Value:
        """A splat. Bit-exact float splats are hidden: what compilers do with known factors and addends is not the device's rounding."""
        exact = splat(value, dtype)
        if dtype.wide is not None:
            return lax.full(shape, in_word(exact, dtype)[()])
        if not dtype.is_float or not self.bitexact:
            return lax.full(shape, exact.astype(self.carrier_type(dtype))[()])
        if dtype == F16:
            bits = lax.convert_element_type(lax.add(self.zero, np.int32(exact.view(np.int16))), jnp.int16)
            return lax.broadcast(lax.bitcast_convert_type(bits, jnp.float16), shape)
        known = exact.astype(np.float32).view(np.int32)
        return lax.broadcast(lax.bitcast_convert_type(lax.add(self.zero, np.int32(known)), jnp.float32), shape)
