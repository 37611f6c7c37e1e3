"""The device's arithmetic in lax, for the fast engine: bit-exact, or native within stated bounds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.device.fast import lax_convolution, lax_sort
from tpuflow.device.fast.half import narrow_moved, widen_bits
from tpuflow.device.fast.lax_elementwise import COMPARE, OPERATIONS
from tpuflow.device.fast.lax_masked_product import Mask, Padding
from tpuflow.device.fast.lax_reduce import extreme, reduced, summed
from tpuflow.device.fast.lax_rounding import Rounding, flushed, in_word, materialized, quiet, widen, word_type
from tpuflow.device.fast.phases import Phases, in_phases
from tpuflow.device.fast.reshapes import transposed
from tpuflow.dtypes import BF16, F16, F32, S32, STORAGE, U32, DType
from tpuflow.isa.contraction import Contraction
from tpuflow.isa.numpy_arithmetic import identity, is_defined, undefined
from tpuflow.isa.numpy_rounding import splat

Value = Any
_CUMULATIVE: dict[str, Callable[..., Value]] = {"add": lax.cumsum, "mul": lax.cumprod, "max": lax.cummax, "min": lax.cummin}
_SCAN_UNROLL = 8
_STORAGE = {dtype.numpy: dtype for dtype in STORAGE}


class LaxArithmetic:
    """Implements `tpuflow.isa.arithmetic.Arithmetic` with traced values. An array of a dtype has one of four forms:

    - the carrier (`load`), in which is computed: f32 for bf16, natively for f16 as well; 8-bit words for types of kind storage;
    - as a buffer of an executable holds it (`hold`): natively the carrier, since XLA:CPU computes in f32 and each reader would widen it
      again; bit-exact the dtype itself, bf16 as u16 words;
    - at rest, between launches, trips and branches (`rest`): the dtype itself, bf16 as u16 words; no larger than on the device;
    - of the dtype's own NumPy type (`store`).

    Each of these methods takes any form. All other dtypes are the same in every form.

    `bitexact` gives the bits of `NumpyArithmetic`. It needs `zero`, an int32 scalar 0 that must be an argument of the compiled function:
    the compiler must not know it. Native (`bitexact=False`) leaves to XLA:CPU the order of f32 sums, the contraction of multiply-add
    and its own special functions. Either way the function must be compiled with `engine.COMPILER_OPTIONS`.
    """

    def __init__(self, bitexact: bool, zero: Value = None):
        if bitexact and zero is None:
            raise ValueError("bit-exact arithmetic needs the run-time int32 zero")
        self.bitexact = bitexact
        self._rounding = Rounding(bitexact, zero)
        self._arguments: dict[int, tuple[Value, Value]] = {}  # by the id of a value, that value and the argument that it is made of
        self._summed: set[int] = set()  # the ids of arguments of which a sum is made

    def given(self, x: Value) -> Value:
        """An argument of the executable, at rest; bf16 is remembered as what the argument is (`to_be_summed`)."""
        bits = words(x)
        if x.dtype == jnp.bfloat16:
            self._arguments[id(bits)] = bits, x
        return bits

    def to_be_summed(self, x: Value) -> Value | None:
        """f32 that is an argument of the executable in bf16, natively, widened again for a sum alone; None if x is none such, or is
        summed like that elsewhere.

        YNNPACK widens it as it sums it, in half the time of XLA:CPU's loop, if nobody else reads what it widens: XLA makes one of two, even
        behind barriers, and writes it first. Everything else reads f32 that is made by shifts of bits."""
        _, argument = self._arguments.get(id(x), (None, None))
        if argument is None or id(argument) in self._summed:
            return None
        self._summed.add(id(argument))
        return lax.convert_element_type(argument, jnp.float32)

    def load(self, stored: Value, dtype: DType) -> Value:
        """The carrier of an array; bits are moved, a NaN keeps its payload."""
        if stored.dtype == self._rounding.carrier_type(dtype):
            return stored
        if dtype.wide is not None:
            return words(stored)
        if dtype != BF16:
            return widen_bits(stored)
        bits = words(stored)
        if self.bitexact:
            return _bf16_to_f32(self._rounding.hide_bits(bits))
        wide = _bf16_to_f32(bits)
        if id(stored) in self._arguments:
            self._arguments[id(wide)] = wide, self._arguments[id(stored)][1]
        return wide

    def store(self, value: Value, dtype: DType) -> Value:
        """The array in the dtype's own type; bits are moved, not rounded (hardware conversions to bf16 flush subnormals, and all of them
        make NaN quiet)."""
        if value.dtype == dtype.numpy:
            return value
        if dtype.wide is not None:
            return _out_of_words(value, dtype)
        if dtype != BF16:
            return narrow_moved(value)
        bits = _bf16_words(value)
        return lax.bitcast_convert_type(bits if self.bitexact else self._rounding.hide_bits(bits), jnp.bfloat16)

    def hold(self, x: Value, dtype: DType) -> Value:
        """The array as a buffer of an executable holds it."""
        if self.bitexact and dtype.wide is None:
            return _bf16_words(x) if dtype == BF16 else self.store(x, dtype)
        return self.load(x, dtype)

    def materialized_if_native(self, x: Value) -> Value:
        """x, in native fidelity written to memory once, so that XLA does not recompute it in each of its readers."""
        return x if self.bitexact else materialized(x)

    def rest(self, x: Value, dtype: DType) -> Value:
        """The array at rest, where XLA can update it in place. Native bf16 ends in a select, as rounding does (see `lax_rounding`)."""
        if dtype.wide is not None:
            return self.load(x, dtype)
        if dtype != BF16:
            return self.store(x, dtype)
        bits = _bf16_words(x)
        return bits if self.bitexact or x.dtype != jnp.float32 else lax.select(lax.ne(x, x), bits | np.uint16(0x7F80), bits)

    def take(self, x: Value, dtype: DType) -> Value:
        """An array at rest, or held, as a buffer holds it: kernels that read it share one widening, which XLA finds to be the same."""
        return x if self.bitexact else self.load(x, dtype)

    def held_type(self, dtype: DType) -> np.dtype[Any]:
        """The NumPy type of what `hold` returns."""
        if self.bitexact and dtype.wide is None:
            return np.dtype(np.uint16) if dtype == BF16 else dtype.numpy
        return self._rounding.carrier_type(dtype)

    def held(self, number: int | float | bool, dtype: DType) -> Value:
        """A 0-d array as a buffer holds it, known to the compiler."""
        if dtype.wide is not None:
            return jnp.asarray(in_word(splat(number, dtype), dtype))
        own = np.asarray(number).astype(dtype.numpy)
        return jnp.asarray(own.view(np.uint16) if self.bitexact and dtype == BF16 else own.astype(self.held_type(dtype)))

    def full(self, shape: tuple[int, ...], value: int | float | bool, dtype: DType) -> Value:
        """A splat."""
        return self._rounding.full(shape, value, dtype)

    def iota(self, shape: tuple[int, ...], axis: int, start: Value, dtype: DType) -> Value:
        """Positions along an axis."""
        positions = lax.broadcasted_iota(jnp.int32, shape, axis)
        moved = positions + lax.convert_element_type(jnp.asarray(start), jnp.int32)
        return self.convert(moved, S32, dtype)

    def unary(self, op: str, a: Value, dtype: DType) -> Value:
        """An operation of `isa.elementwise.UNARY`."""
        return self._apply(op, dtype, a)

    def binary(self, op: str, a: Value, b: Value, dtype: DType) -> Value:
        """An operation of `isa.elementwise.BINARY`."""
        return self._apply(op, dtype, a, b)

    def _apply(self, op: str, dtype: DType, *operands: Value) -> Value:
        if not is_defined(op, dtype):
            raise undefined(op, dtype)
        return OPERATIONS[dtype.kind][op](self._rounding, dtype, *operands)

    def is_finite(self, a: Value, dtype: DType) -> Value:
        """Neither infinite nor NaN."""
        return lax.is_finite(widen(a, dtype)) if dtype.is_float else jnp.ones(a.shape, jnp.bool_)

    def compare(self, op: str, a: Value, b: Value, dtype: DType) -> Value:
        """A comparison of `isa.elementwise.COMPARE`."""
        return COMPARE[op](self._comparable(a, dtype), self._comparable(b, dtype))

    def _comparable(self, a: Value, dtype: DType) -> Value:
        """Floats with the flush written out: a comparison of bits just moved to a float register need not be done by the float unit."""
        if not dtype.is_float:
            return a
        return flushed(a, dtype) if dtype == BF16 or self.bitexact else widen(a, dtype)

    def select(self, pred: Value, on_true: Value, on_false: Value, dtype: DType) -> Value:
        """Bits of one or the other."""
        return lax.select(pred, on_true, on_false)

    def convert(self, a: Value, from_dtype: DType, to_dtype: DType) -> Value:
        """Values in another type."""
        if from_dtype == to_dtype:
            return a
        if from_dtype.wide is not None:
            return self.convert(self._computed(a, from_dtype), from_dtype.wide, to_dtype)
        if to_dtype.wide is not None:
            return self._to_storage(a, from_dtype, to_dtype)
        if to_dtype.kind == "pred":
            return self._nonzero(a, from_dtype)
        if to_dtype.is_float:
            return self._to_float(a, from_dtype, to_dtype)
        return lax.convert_element_type(widen(a, from_dtype) if from_dtype.is_float else a, to_dtype.numpy)

    def _nonzero(self, a: Value, dtype: DType) -> Value:
        comparable = self._comparable(a, dtype)
        return lax.ne(comparable, jnp.zeros_like(comparable))

    def _to_float(self, a: Value, from_dtype: DType, to_dtype: DType) -> Value:
        if from_dtype.is_float:
            wide = quiet(a) if self.bitexact and (from_dtype, to_dtype) == (F32, BF16) else widen(a, from_dtype)
            return self._rounding.from_f32(wide, to_dtype)
        if to_dtype == BF16 and from_dtype.bytes == 4:
            a = _sticky(a)
        return self._rounding.from_f32(lax.convert_element_type(a, jnp.float32), to_dtype)

    def _computed(self, a: Value, dtype: DType) -> Value:
        """Words of a type of kind storage as numbers of the type that they are computed in."""
        if not dtype.computed.is_float:
            return lax.convert_element_type(a, dtype.computed.numpy)
        return self._rounding.canonical(lax.convert_element_type(_out_of_words(a, dtype), dtype.computed.numpy))

    def _to_storage(self, a: Value, from_dtype: DType, to_dtype: DType) -> Value:
        if to_dtype.computed.is_float:
            wide = self.convert(_sticky(a) if from_dtype in (S32, U32) else a, from_dtype, F32)
            return words(lax.convert_element_type(self._rounding.canonical(wide), to_dtype.numpy))
        integers = lax.convert_element_type(widen(a, from_dtype) if from_dtype.is_float else a, jnp.int32)
        if from_dtype.is_float:
            limits = jnp.iinfo(to_dtype.numpy)
            return lax.convert_element_type(lax.clamp(np.int32(limits.min), integers, np.int32(limits.max)), word_type(to_dtype))
        cut = jnp.full_like(integers, 32 - to_dtype.bits)
        back = lax.shift_right_arithmetic if to_dtype.computed.kind == "int" else lax.shift_right_logical
        return lax.convert_element_type(back(lax.shift_left(integers, cut), cut), word_type(to_dtype))

    def bitcast(self, a: Value, from_dtype: DType, to_dtype: DType) -> Value:
        """Bits as another type."""
        a = _bf16_bits(a) if from_dtype == BF16 else self.store(a, from_dtype)
        if to_dtype == BF16:
            return _bf16_to_f32(lax.bitcast_convert_type(a, jnp.uint16))
        if to_dtype.kind == "pred":
            return lax.ne(a, jnp.zeros_like(a))
        if from_dtype.kind == "pred":
            a = lax.convert_element_type(a, jnp.uint8)
        return self.load(lax.bitcast_convert_type(a, to_dtype.numpy), to_dtype)

    def broadcast(self, a: Value, shape: tuple[int, ...], axes: Sequence[int]) -> Value:
        """A stretched value."""
        order = sorted(range(a.ndim), key=lambda i: axes[i])
        return lax.broadcast_in_dim(transposed(a, order), shape, [axes[i] for i in order])

    def transpose(self, a: Value, permutation: Sequence[int]) -> Value:
        """Axes in another order."""
        return transposed(a, permutation)

    def concatenate(self, values: Sequence[Value], axis: int) -> Value:
        """One after the other."""
        return lax.concatenate(values, axis)

    def reduce(
        self, op: str, start: Value | None, a: Value, axes: Sequence[int], block: int, dtype: DType, *,
        in_memory: bool = False, from_zero: bool = False,
    ) -> Value:  # fmt: skip
        """Halving trees, block after block; in any order where that cannot be seen, or native f32. in_memory: nothing computes `a` as it is
        reduced. from_zero: `start` is not -0, so that whether `a` sums to -0 or +0 cannot be seen. start: None for the identity of a native
        extreme."""
        moved = in_memory and dtype != F16
        if start is None:
            return self._reduce_freely(op, a, axes, dtype, moved=moved)
        if a.size == 0:
            return start
        rounds = dtype != F32 and op in ("add", "mul")
        if not dtype.is_float or not (rounds or self.bitexact):
            if op == "add" and dtype == F32:
                found = summed(a, axes, from_zero=from_zero, in_memory=in_memory)
            else:
                found = self._reduce_freely(op, a, axes, dtype, moved=moved)
            return self.binary(op, start, found, dtype)
        block = block if op in ("add", "mul") else a.size  # of all others the order cannot be seen
        blocks = self._halve(op, self._in_blocks(op, a, axes, block, dtype), 1, dtype)  # [blocks, 1, kept...]

        def combine(total: Value, one: Value) -> tuple[Value, None]:
            return self.binary(op, total, one.reshape(start.shape), dtype), None

        total, _ = lax.scan(combine, start, blocks, unroll=min(_SCAN_UNROLL, len(blocks)))
        return total

    def _reduce_freely(self, op: str, a: Value, axes: Sequence[int], dtype: DType, *, moved: bool) -> Value:
        if dtype.is_float and op in ("max", "min"):
            as_words = lax.bitcast_convert_type(_bf16_words(a), jnp.int16) if dtype == BF16 else a
            found = extreme(op, as_words, axes, moved=moved)
            return _bf16_to_f32(lax.bitcast_convert_type(found, jnp.uint16)) if dtype == BF16 else found
        nothing = np.asarray(identity(op, dtype)).astype(self._rounding.carrier_type(dtype))[()]
        return reduced(a, axes, lambda x, y: self.binary(op, x, y, dtype), nothing)

    def _in_blocks(self, op: str, a: Value, axes: Sequence[int], block: int, dtype: DType) -> Value:
        """[blocks, block, kept...]; a last block that is shorter is filled up with the identity, which cannot be seen."""
        kept = [axis for axis in range(a.ndim) if axis not in axes]
        along = lax.transpose(a, (*axes, *kept)).reshape(-1, *(a.shape[axis] for axis in kept))
        n = along.shape[0]
        length = min(block, n)
        fill = np.asarray(identity(op, dtype), self._rounding.carrier_type(dtype))[()]
        whole = lax.pad(along, fill, [(0, -n % length, 0), *((0, 0, 0) for _ in kept)])
        return whole.reshape(-1, length, *whole.shape[1:])

    def _halve(self, op: str, a: Value, axis: int, dtype: DType) -> Value:
        n = a.shape[axis]
        size = 1 << (n - 1).bit_length()
        if size > n:
            missing = [(0, size - n if i == axis else 0, 0) for i in range(a.ndim)]
            a = lax.pad(a, np.asarray(identity(op, dtype), self._rounding.carrier_type(dtype))[()], missing)
        while size > 1:
            size //= 2
            low, high = lax.slice_in_dim(a, 0, size, axis=axis), lax.slice_in_dim(a, size, 2 * size, axis=axis)
            a = self.binary(op, low, high, dtype)
        return a

    def cumulative(self, op: str, carry: Value, a: Value, axis: int, dtype: DType) -> tuple[Value, Value]:
        """A running combination: bit-exact floats step by step, all others in XLA's order (which loses the sign of zeros)."""
        if a.shape[axis] == 0:
            return a, carry
        if self.bitexact and dtype.is_float:
            return self._cumulative_in_order(op, carry, a, axis, dtype)
        if dtype in (F16, BF16):
            running = self._cumulative_rounded(op, a, axis, dtype)
        elif dtype.kind == "pred":
            running = lax.associative_scan(lambda x, y: self.binary(op, x, y, dtype), a, axis=axis)
        else:
            running = _CUMULATIVE[op](a, axis)
        stretched = lax.broadcast_in_dim(carry, a.shape, range(a.ndim))
        values = self.binary(op, stretched, running, dtype)
        return values, lax.slice_in_dim(values, a.shape[axis] - 1, None, axis=axis)

    def _cumulative_rounded(self, op: str, a: Value, axis: int, dtype: DType) -> Value:
        """Every combination rounded to the type, but moved as f32: hosts without f16 conversions cannot add up f16 arrays."""

        def combine(x: Value, y: Value) -> Value:
            return widen(self.binary(op, self._rounding.from_f32(x, dtype), self._rounding.from_f32(y, dtype), dtype), dtype)

        return self._rounding.from_f32(lax.associative_scan(combine, widen(a, dtype), axis=axis), dtype)

    def _cumulative_in_order(self, op: str, carry: Value, a: Value, axis: int, dtype: DType) -> tuple[Value, Value]:
        def step(last: Value, row: Value) -> tuple[Value, Value]:
            new = self.binary(op, last, row, dtype)
            return new, new

        first = lax.squeeze(carry, (axis,))
        last, rows = lax.scan(step, first, jnp.moveaxis(a, axis, 0), unroll=min(_SCAN_UNROLL, a.shape[axis]))
        return jnp.moveaxis(rows, 0, axis), lax.expand_dims(last, (axis,))

    def sort(self, operands: Sequence[Value], dtypes: Sequence[DType], axis: int, keys: int, count: int) -> tuple[Value, ...]:
        """The first `count` of all operands in the order of the first `keys`."""
        return lax_sort.sort(operands, dtypes, axis, keys, count)

    def patches(self, a: Value, axis: int, outer: int, inner: int, stride: int, dilation: int) -> Value:
        """Two axes for one."""
        return lax_convolution.patches(a, axis, outer, inner, stride, dilation)

    def convolve(
        self, a: Value, b: Value, contraction: Contraction, sizes: Mapping[int, int], dtype: DType, acc_dtype: DType,
        a_mask: Mask | None = None, b_mask: Mask | None = None, low_padding: Sequence[int] | None = None, phases: Sequence[Phases] = (),
    ) -> Value:  # fmt: skip
        """`matmul` of the patches of `a`, whose axes may slide. sizes: the lengths of their labels.

        a_mask, b_mask give the masks that `matmul` takes, but of `a` without its patches; they are called only if they are needed.
        low_padding: zeros to pad before each sliding axis of `a` (as many as the patches need are padded after it). phases: of `b`, which
        leave its padding out.
        """
        zeros = (0,) * len(contraction.sliding) if low_padding is None else low_padding
        lengths, right = [a.shape[s.axis] for s in contraction.sliding], None if phases else b_mask

        def multiply(x: Value, y: Value, zeros: Sequence[int], sizes: Mapping[int, int]) -> Value:
            padding = Padding(contraction, sizes, zeros, lengths, dtype, self.bitexact, a_mask, right)
            return lax_convolution.convolve(self._rounding, x, y, contraction, zeros, sizes, dtype, acc_dtype, padding.correct)

        return in_phases(phases, multiply, a, b, contraction, zeros, sizes)

    def positions(self, shape: Sequence[int], axis: int) -> Value:
        """Positions along an axis."""
        return lax.broadcasted_iota(jnp.int32, tuple(shape), axis)

    def matmul(
        self, a: Value, b: Value, contraction: Contraction, dtype: DType, acc_dtype: DType,
        a_mask: Value = None, b_mask: Value = None,
    ) -> Value:  # fmt: skip
        """One K-tile of the matrix unit."""
        left, right = (None if x is None else functools.partial(jnp.asarray, x) for x in (a_mask, b_mask))
        return self.convolve(a, b, contraction, {}, dtype, acc_dtype, left, right)


def words(x: Value) -> Value:
    """bf16 as u16, types of kind storage as words of 8 bits, others as given: XLA:CPU moves bf16 as f32 that it narrows again, which makes
    NaN quiet, and has few operations on what is narrower."""
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(x, jnp.uint16)
    dtype = _STORAGE.get(x.dtype)
    if dtype is None:
        return x
    return lax.bitcast_convert_type(x, jnp.uint8) if dtype.computed.is_float else lax.convert_element_type(x, word_type(dtype))


def _out_of_words(x: Value, dtype: DType) -> Value:
    """What `words` made of an array of a type of kind storage in its own type."""
    convert = lax.bitcast_convert_type if dtype.computed.is_float else lax.convert_element_type
    return convert(x, dtype.numpy)


def _bf16_words(x: Value) -> Value:
    """u16 bits of bf16 in any form."""
    return _bf16_bits(x) if x.dtype == jnp.float32 else words(x)


def _bf16_bits(carrier: Value) -> Value:
    bits = lax.bitcast_convert_type(carrier, jnp.uint32)
    return lax.convert_element_type(lax.shift_right_logical(bits, jnp.full_like(bits, 16)), jnp.uint16)


def _bf16_to_f32(bits: Value) -> Value:
    wide = lax.convert_element_type(bits, jnp.uint32)
    return lax.bitcast_convert_type(lax.shift_left(wide, jnp.full_like(wide, 16)), jnp.float32)


def _sticky(a: Value) -> Value:
    """32-bit integers of which f32 holds enough for one rounding to bf16: large ones end in a bit that says if anything was cut off."""
    low = lax.rem(lax.bitcast_convert_type(a, jnp.uint32), jnp.full(a.shape, 256, jnp.uint32))
    high = lax.sub(a, lax.bitcast_convert_type(low, a.dtype))
    cut = lax.select(lax.ne(low, jnp.zeros_like(low)), jnp.full_like(a, 256), jnp.zeros_like(a))
    size = a if a.dtype.kind == "u" else lax.bitcast_convert_type(lax.abs(a), jnp.uint32)
    return lax.select(lax.lt(size, jnp.full_like(size, 1 << 24)), a, lax.bitwise_or(high, cut))
