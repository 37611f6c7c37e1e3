"""Error bounds of a float64 product: for which elements the order of summation could change the result after rounding to f32."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.device.fast.product_places import Axes, Places, Value
from tpuflow.dtypes import BF16, F16, DType
from tpuflow.isa.numpy_matmul import SLACK

_MASK_BITS = 64
_MASKED_TERMS = 256
_PIECES = 16
_LEAST_LENGTH = 40  # shorter sums XLA adds up as part of who reads them, anew for each
_PRECISION = {F16: 11, BF16: 8}
_EXACT = 2.0**53 - 2.0**33  # the multiples of one number that float64 has in a row, less far more than rounding takes off the bounds
SMALLEST = {F16: 2.0**-24, BF16: 0.0}
"""Every f16 number is a multiple of its smallest one, whose grain so is no smaller."""


@dataclass(frozen=True)
class Bounds:
    """Facts about the rows of an operand (columns, of the right one), as arrays over its axes that are not contracted.

    `operand`: the labels of all its axes; `axes`: of those that are not contracted. `norm`: Euclidean norms. `grain`: for f16 and bf16, if
    it is known, a number of which every element is a multiple (infinite for zeros). `masks`: for short sums of f32, which elements are not
    zero, as bits of u32 words.
    """

    operand: tuple[int, ...]
    axes: tuple[int, ...]
    norm: Value
    grain: Value | None
    masks: tuple[Value, ...]

    @classmethod
    def of(cls, x: Value, axes: tuple[int, ...], places: Places, dtype: DType) -> Bounds:
        contracted = [i for i, label in enumerate(axes) if label in places.contracted]
        # In f32, whose sums are half the work: too small by K u at most, and by what each square below the smallest normal number lost.
        squares = lax.convert_element_type(_bound_along(lambda x: x * x, lax.add, 0.0, x, contracted), jnp.float64)
        squares = squares * np.float64(1 + places.terms * 2.0**-23) + np.float64(places.terms * 2.0**-126)
        norm, free = lax.sqrt(squares), tuple(label for label in axes if label not in places.contracted)
        return cls(axes, free, norm, None, _masks(x, axes, places) if dtype not in _PRECISION and places.terms <= _MASKED_TERMS else ())

    def with_grain(self, x: Value, places: Places, dtype: DType, unseen: bool = False) -> Bounds:
        """These bounds of an operand in f16 or bf16 with the grain of its rows; `unseen`: without reading x, the grain of all f16
        numbers."""
        if unseen:
            return replace(self, grain=jnp.full_like(self.norm, SMALLEST[dtype]))
        contracted = [i for i, label in enumerate(self.operand) if label in places.contracted]
        least = lax.convert_element_type(_bound_along(_size_or_infinite, lax.min, np.inf, x, contracted), jnp.float64)
        return replace(self, grain=lax.max(least * np.float64(2.0 ** -_PRECISION[dtype]), jnp.full_like(least, SMALLEST[dtype])))

    def over(self, places: Places, bound: Value) -> Value:
        """One of the arrays, broadcast over the product."""
        order = sorted(range(len(self.axes)), key=lambda i: places.product.index(self.axes[i]))
        return lax.broadcast_in_dim(lax.transpose(bound, order), places.sizes, [places.product.index(self.axes[i]) for i in order])


def _bound_along(of: Callable[[Value], Value], combine: Callable[[Value, Value], Value], nothing: float, x: Value, axes: Axes) -> Value:
    """`of(x)` reduced along axes; some elements may count twice, which is fine for a bound. First elementwise over slices of the longest
    axis, which XLA fuses: of a plain reduction it writes `of` every element to memory, and reads them one by one."""
    longest = max(axes, key=lambda axis: x.shape[axis])
    n = x.shape[longest]
    pieces = _pieces(n)
    length = -(-n // pieces)
    starts = [min(k * length, n - length) for k in range(pieces)]
    combined = functools.reduce(combine, [of(lax.slice_in_dim(x, start, start + length, axis=longest)) for start in starts])
    return lax.reduce(combined, np.float32(nothing), combine, axes)


def _pieces(n: int) -> int:
    """The number of slices of an axis of n elements: a divisor of n, unless that leaves less than half of the slices possible."""
    most = max(1, min(_PIECES, n // _LEAST_LENGTH))
    evenly = max(k for k in range(1, most + 1) if n % k == 0)
    return evenly if 2 * evenly >= most else most


def _size_or_infinite(x: Value) -> Value:
    """|x|, infinite for zeros."""
    size = lax.abs(x)
    return lax.select(lax.eq(size, jnp.zeros_like(size)), jnp.full_like(size, np.inf), size)


def _masks(x: Value, axes: Axes, places: Places) -> tuple[Value, ...]:
    """Which of `_MASK_BITS` groups of contracted positions hold anything but zeros, in words of 32 bits, for each row or column."""
    free = [i for i, label in enumerate(axes) if label not in places.contracted]
    order = [*(list(axes).index(label) for label in places.contracted), *free]
    sizes = [x.shape[i] for i in free]
    terms = lax.reshape(lax.transpose(lax.ne(x, jnp.zeros_like(x)), order), (places.terms, *sizes))
    group = -(-places.terms // _MASK_BITS)
    missing = group * _MASK_BITS - places.terms
    terms = lax.pad(terms, np.False_, [(0, missing, 0), *((0, 0, 0) for _ in free)]) if missing else terms
    groups = lax.reshape(terms, (_MASK_BITS // 32, 32, group, *sizes))
    held = lax.convert_element_type(functools.reduce(lax.bitwise_or, [groups[:, :, k] for k in range(group)]), jnp.uint32)
    bits = held << np.arange(32, dtype=np.uint32).reshape(1, 32, *(1 for _ in free))
    return tuple(combined_in_pieces(lax.bitwise_or, lax.reduce_or, word) for word in bits)


def combined_in_pieces(combine: Callable[[Value, Value], Value], reduce: Callable[[Value, Axes], Value], x: Value) -> Value:
    """x reduced along its first axis: first elementwise over slices of it, which XLA fuses, then by `reduce`."""
    n = x.shape[0]
    pieces = next(k for k in (8, 4, 2, 1) if n % k == 0)
    return reduce(functools.reduce(combine, [x[k * n // pieces : (k + 1) * n // pieces] for k in range(pieces)]), (0,))


def are_exact(left: Bounds, right: Bounds) -> Value:
    """pred []: whether no sum of the product rounds in float64, because its terms are all multiples of a large enough number."""
    most = [lax.reduce_max(bounds.norm / bounds.grain, tuple(range(bounds.norm.ndim))) for bounds in (left, right)]
    return lax.lt(most[0] * most[1], np.float64(_EXACT))


def doubtful_places(sums: Value, left: Bounds, right: Bounds, places: Places) -> Value:
    """Where the order of summation could change the f32 result: where sums - slack and sums + slack round to different bits, unless the
    element's sum is exact (see `are_exact`, and `Bounds.masks`)."""
    size = left.over(places, left.norm) * right.over(places, right.norm)
    slack = size * np.float64(SLACK * places.terms)
    low, high = (lax.bitcast_convert_type(lax.convert_element_type(x, jnp.float32), jnp.int32) for x in (sums - slack, sums + slack))
    doubtful = lax.ne(low, high) & lax.is_finite(sums)
    if left.masks:
        words = [left.over(places, x) & right.over(places, y) for x, y in zip(left.masks, right.masks, strict=True)]
        doubtful = doubtful & (_several if places.terms <= _MASK_BITS else _any_bit)(words)
    if left.grain is None or right.grain is None:
        return doubtful
    return doubtful & lax.ge(size, left.over(places, left.grain) * right.over(places, right.grain) * np.float64(_EXACT))


def _any_bit(words: Sequence[Value]) -> Value:
    """Whether a sum has a term that is not zero; one without is exact in any order."""
    met = functools.reduce(lax.bitwise_or, words)
    return lax.ne(met, jnp.zeros_like(met))


def _several(words: Sequence[Value]) -> Value:
    """Whether more than one bit is set; a sum with a single term that is not zero is exact."""
    found, before = [], jnp.zeros_like(words[0])
    for word in words:
        found.append((word & (word - np.uint32(1))) | lax.select(lax.eq(word, jnp.zeros_like(word)), word, before))
        before = before | word
    return _any_bit(found)
