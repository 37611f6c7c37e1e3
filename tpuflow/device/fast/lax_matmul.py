"""The matrix unit's sum in lax: bit-exact (float64, ascending, rounded once) and native (XLA's f32 dot)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.device.fast.lax_rounding import Rounding, widen, x64
from tpuflow.dtypes import BF16, F16, F32, DType
from tpuflow.isa.contraction import Contraction
from tpuflow.isa.numpy_matmul import SLACK

Value = Any
Axes = Sequence[int]

_CHUNK = 16
_ASCENDING = 128
_AT_ONCE = 32
_AT_ONCE_LEAST = 8
_TERMS_AT_ONCE = 4096
_RUN = 64
_STRIPES = 128
_DIRECT_PRODUCTS = 1 << 16
_MANY_TERMS = 128
_MASK_BITS = 64
_MASKED_TERMS = 256
_PIECES = 16
_LEAST_LENGTH = 40  # shorter sums XLA adds up as part of who reads them, anew for each
_LONG, _NARROWER = 32, 1.5
_PRECISION = {F16: 11, BF16: 8}
_DOUBTFUL = 0x7FFFD0B7  # bits of a NaN, as s32 greater than those of any number and of the canonical NaN
_EXACT = 2.0**53 - 2.0**33  # the multiples of one number that float64 has in a row, less far more than rounding takes off the bounds
_SMALLEST = {F16: 2.0**-24, BF16: 0.0}  # every f16 number is a multiple of its smallest one, whose grain so is no smaller


def matmul(rounding: Rounding, a: Value, b: Value, whole: Contraction, dtype: DType, acc: DType) -> Value:
    """See `Arithmetic.matmul`; operands are carriers."""
    if dtype.is_float and not rounding.bitexact:
        return _native(widen(a, dtype), widen(b, dtype), whole)
    if dtype.is_float:
        product = _ordered(rounding, widen(a, dtype), widen(b, dtype), whole, dtype)
    else:
        product = _modular(a, b, _dimensions(whole), acc)
    order = _product_axes(whole)
    return lax.transpose(product, [order.index(x) for x in whole.out])


def _native(a: Value, b: Value, whole: Contraction) -> Value:
    """XLA's dot of f32 operands, of matrices if their columns are long: the narrower on the left then."""
    if not _are_long(a, b, whole):
        product, order = lax.dot_general(a, b, _dimensions(whole), preferred_element_type=jnp.float32), _product_axes(whole)
        return lax.transpose(product, [order.index(x) for x in whole.out])
    return of_matrices(a, b, whole) if a.size < b.size else of_matrices(b, a, Contraction(whole.rhs, whole.lhs, whole.out))


def _are_long(a: Value, b: Value, whole: Contraction) -> bool:
    """Whether operands are [K, columns] with many more terms than columns, and one much narrower than the other, as those of the gradient
    of a 1x1 convolution's weights.

    XLA turns the left one of many axes into [rows, K], in memory; XLA:CPU's loop turns that of a matrix itself, piece by piece, which it
    does once for every piece of the product. A core takes for K = 51200, of 64 and 32 columns, 2.9 ms and 2.1; for K = 12800, of 256 and
    128, 5.8 and 5.0; but for K = 800, of 512 and 256, 1.0 and 1.1, and for GPT-2's K = 512, of 3072 and 768, 11.1 and 12.0.
    """
    n = len(whole.contracted)
    if whole.batch or whole.lhs[:n] != whole.rhs[:n] or set(whole.lhs[:n]) != set(whole.contracted) or 0 in (a.size, b.size):
        return False
    terms = math.prod(a.shape[:n])
    narrow, wide = sorted((a.size // terms, b.size // terms))
    return terms >= _LONG * wide and wide >= _NARROWER * narrow


def of_matrices(a: Value, b: Value, whole: Contraction) -> Value:
    """XLA's dot of f32 operands with many axes, of matrices as far as that goes: neighbouring axes of one role are merged, so that a
    turned operand is not copied."""
    sizes = whole.by_label(a.shape, b.shape)
    a_runs, b_runs = _runs(whole.lhs, whole.rhs, whole.out), _runs(whole.rhs, whole.lhs, whole.out)
    left, right = (lax.reshape(x, [math.prod(sizes[y] for y in run) for run in runs]) for x, runs in ((a, a_runs), (b, b_runs)))
    run_of = {run[0]: run for run in (*a_runs, *b_runs)}
    lhs, rhs, out = (tuple(x for x in side if x in run_of) for side in (whole.lhs, whole.rhs, whole.out))
    merged = Contraction(lhs, rhs, out)
    product = lax.dot_general(left, right, _dimensions(merged), preferred_element_type=jnp.float32)
    order = [x for first in _product_axes(merged) for x in run_of[first]]
    return lax.transpose(lax.reshape(product, [sizes[x] for x in order]), [order.index(x) for x in whole.out])


def _runs(axes: Axes, others: Axes, out_axes: Axes) -> list[list[int]]:
    """Axes of one operand in runs which are of one role, and neighbours in the other operand as well if it has them."""
    place = {x: i for i, x in enumerate(others)}
    runs: list[list[int]] = []
    for i, x in enumerate(axes):
        before = axes[i - 1]
        alike = i > 0 and (x in place, x in out_axes) == (before in place, before in out_axes)
        if alike and (x not in place or place[x] == place[before] + 1):
            runs[-1].append(x)
        else:
            runs.append([x])
    return runs


def _dimensions(whole: Contraction) -> tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]:
    """XLA's dot dimension numbers."""
    contracted, batch = whole.contracted, whole.batch
    return (
        ([whole.lhs.index(x) for x in contracted], [whole.rhs.index(x) for x in contracted]),
        ([whole.lhs.index(x) for x in batch], [whole.rhs.index(x) for x in batch]),
    )


def _modular(a: Value, b: Value, numbers: Any, acc: DType) -> Value:
    """Integers modulo 2^32; s8 and s16 operands go to XLA as they are, it has faster loops for them."""
    if a.dtype.kind == "u":
        a, b = lax.convert_element_type(a, jnp.int32), lax.convert_element_type(b, jnp.int32)
    return lax.convert_element_type(lax.dot_general(a, b, numbers, preferred_element_type=jnp.int32), acc.numpy)


def _ordered(rounding: Rounding, a: Value, b: Value, whole: Contraction, dtype: DType) -> Value:
    """f32 operands -> f32 product, the float64 sums taken in ascending order of the contracted positions.

    XLA's float64 dot adds in an order of its own (it depends on shapes, layouts and threads). Products of two f32 are exact in float64
    and two orders of adding K terms differ by at most 2 (K - 1) u sum|a b| <= 2 (K - 1) u |a| |b|, so nearly every sum rounds to the
    same f32 in any order; the others are found by that bound and added again in ascending order.
    """
    places = _Places.of(whole, a, b)
    if places.terms <= _CHUNK or math.prod(places.sizes) * places.terms <= _DIRECT_PRODUCTS:
        with x64():
            return rounding.hide(_summed_directly(rounding, a, b, places))
    a, b = (_made_once(rounding, x, places) for x in (a, b))
    turned, turned_whole = _terms_last(a, whole)
    if dtype != F32:  # bounds of f32 read the operand as it lies, which is quicker; those of the others what is there anyway
        a, whole, places = turned, turned_whole, _Places.of(turned_whole, turned, b)
    with x64():
        wide_a, wide_b = lax.convert_element_type(turned, jnp.float64), lax.convert_element_type(b, jnp.float64)
        sums = lax.dot_general(wide_a, wide_b, _dimensions(turned_whole))
        left, right = _Bounds.of(a, whole.lhs, places, dtype), _Bounds.of(b, whole.rhs, places, dtype)
        read = (a, b) if dtype == F32 else (wide_a, wide_b)  # what is there anyway: f16 and bf16 would be widened to f32 for this alone

        def rounded(sums: Value) -> Value:
            return rounding.narrow(_started_from_zero(sums), F32)

        def mended(left: _Bounds, right: _Bounds, sums: Value) -> Value:
            return _mended(rounding, rounded(sums), _doubtful(sums, left, right, places), places, *read)

        if dtype == F32:
            return rounding.hide(mended(left, right, sums))
        unseen = [x.size > sums.size and _SMALLEST[dtype] > 0 for x in (a, b)]  # all of a large operand is read only where that is needed
        known = [bounds.with_grain(x, places, dtype, unseen) for bounds, x, unseen in zip((left, right), (a, b), unseen, strict=True)]

        def looked_through(sums: Value) -> Value:
            found = [bounds.with_grain(x, places, dtype) if no else bounds for bounds, x, no in zip(known, (a, b), unseen, strict=True)]
            return lax.cond(_are_exact(*found), rounded, functools.partial(mended, *found), sums)

        if not any(unseen):
            return rounding.hide(looked_through(sums))
        return rounding.hide(lax.cond(_are_exact(*known), rounded, looked_through, sums))


def _made_once(rounding: Rounding, x: Value, places: _Places) -> Value:
    """An operand, settled if its elements are in many terms each: the product, each bound and the sums that are added again read it, and
    XLA would compute what it was made by anew for each, element by element where it lies turned."""
    return rounding.settled(x) if math.prod(places.sizes) * places.terms >= _MANY_TERMS * x.size else x


def _terms_last(a: Value, whole: Contraction) -> tuple[Value, Contraction]:
    """The left operand with its contracted axes behind all others, and the contraction of it: XLA's float64 dot takes twice as long where
    it has to turn the left operand itself, 0.58 ms for [64, 784] by [64, 512] in place of 0.36. The barrier keeps it from doing so anyway:
    it would take the transposition into the dot."""
    order = sorted(range(a.ndim), key=lambda i: whole.lhs[i] in whole.contracted)
    if order == list(range(a.ndim)):
        return a, whole
    return lax.optimization_barrier(lax.transpose(a, order)), replace(whole, lhs=tuple(whole.lhs[i] for i in order))


def _summed_directly(rounding: Rounding, a: Value, b: Value, places: _Places) -> Value:
    """One term after the other for all elements at once: quicker where the sums are short, and to compile.

    In a loop of at least two trips, even if that is short: XLA would add up anew for each reader what is not a loop's.
    """

    def terms_first(x: Value, axes: Axes) -> Value:
        """[K, ...] with size 1 on the product's axes that the operand lacks."""
        order = [axes.index(label) for label in (*places.contracted, *(p for p in places.product if p in axes))]
        sizes = (size if label in axes else 1 for label, size in zip(places.product, places.sizes, strict=True))
        return lax.reshape(lax.transpose(x, order), (places.terms, *sizes))

    def add_terms(sums: Value, terms: tuple[Value, Value]) -> tuple[Value, None]:
        left, right = (lax.convert_element_type(x, jnp.float64) for x in terms)
        for i in range(left.shape[0]):
            sums = sums + left[i] * right[i]
        return sums, None

    left, right = terms_first(a, places.a_axes), terms_first(b, places.b_axes)
    chunk = min(_CHUNK, places.terms // 2)
    whole = places.terms // chunk * chunk if chunk else 0
    sums = jnp.zeros(places.sizes, jnp.float64)
    if whole:
        chunks = [lax.reshape(x[:whole], (whole // chunk, chunk, *x.shape[1:])) for x in (left, right)]
        sums, _ = lax.scan(add_terms, sums, (chunks[0], chunks[1]))
    return rounding.narrow(_started_from_zero(add_terms(sums, (left[whole:], right[whole:]))[0]), F32)


def _started_from_zero(sums: Value) -> Value:
    """Sums as they are when +0 came first: never -0. (XLA drops an addition of a zero that it knows.)"""
    nothing = jnp.zeros_like(sums)
    return lax.select(lax.eq(sums, nothing), nothing, sums)


@dataclass(frozen=True)
class _Places:
    """Where the terms of an element of the product lie: labels of the product's axes, and of each operand's."""

    product: tuple[int, ...]
    sizes: tuple[int, ...]
    contracted: tuple[int, ...]
    terms: int
    a_axes: tuple[int, ...]
    b_axes: tuple[int, ...]

    @classmethod
    def of(cls, whole: Contraction, a: Value, b: Value) -> _Places:
        sizes, product, contracted = whole.by_label(a.shape, b.shape), _product_axes(whole), whole.contracted
        terms = math.prod(sizes[x] for x in contracted)
        return cls(product, tuple(sizes[x] for x in product), contracted, terms, whole.lhs, whole.rhs)

    def starts(self, axes: Axes, place: Value) -> Value:
        """s32 [C, the axes that are not contracted]: where the terms of elements begin, which are counted through the product."""
        left, index = lax.max(place, jnp.zeros_like(place)), {}
        for label, size in zip(reversed(self.product), reversed(self.sizes), strict=True):
            index[label], left = lax.rem(left, np.int32(size)), lax.div(left, np.int32(size))
        free = [index[label] for label in axes if label not in self.contracted]
        return jnp.stack(free, axis=1) if free else jnp.zeros((place.size, 0), jnp.int32)

    def terms_of(self, operand: Value, axes: Axes, starts: Value) -> Value:
        """float64 [K, C]: what the operand brings to each of C elements, whose terms begin there."""
        free = [i for i, label in enumerate(axes) if label not in self.contracted]
        within = [i for i in range(len(axes)) if i not in free]
        sizes = [1 if i in free else operand.shape[i] for i in range(len(axes))]
        numbers = lax.GatherDimensionNumbers(tuple(range(len(within))), tuple(free), tuple(free))
        pieces = lax.gather(operand, starts, numbers, sizes, mode="promise_in_bounds")
        order = sorted(range(len(within)), key=lambda i: self.contracted.index(axes[within[i]]))
        rows = lax.reshape(lax.transpose(pieces, [*order, len(within)]), (self.terms, len(starts)))
        return lax.convert_element_type(rows, jnp.float64)


def _product_axes(whole: Contraction) -> tuple[int, ...]:
    """The order of axes in which XLA's dot gives the product."""
    rows, columns = whole.rows, whole.columns
    return (*whole.batch, *(x for x in whole.lhs if x in rows), *(x for x in whole.rhs if x in columns))


@dataclass(frozen=True)
class _Bounds:
    """What is known of an operand's rows (or columns), arrays over its axes that are not contracted, whose labels are `axes`: their
    Euclidean norm; for f16 and bf16, if that is known, a number of which every element is a multiple (infinite for zeros); for short sums
    of f32, where elements are not zero, as bits of u32 words. `operand`: the labels of all its axes."""

    operand: tuple[int, ...]
    axes: tuple[int, ...]
    norm: Value
    grain: Value | None
    masks: tuple[Value, ...]

    @classmethod
    def of(cls, x: Value, axes: tuple[int, ...], places: _Places, dtype: DType) -> _Bounds:
        contracted = [i for i, label in enumerate(axes) if label in places.contracted]
        # In f32, whose sums are half the work: too small by K u at most, and by what each square below the smallest normal number lost.
        squares = lax.convert_element_type(_bound_along(lambda x: x * x, lax.add, 0.0, x, contracted), jnp.float64)
        squares = squares * np.float64(1 + places.terms * 2.0**-23) + np.float64(places.terms * 2.0**-126)
        norm, free = lax.sqrt(squares), tuple(label for label in axes if label not in places.contracted)
        return cls(axes, free, norm, None, _masks(x, axes, places) if dtype not in _PRECISION and places.terms <= _MASKED_TERMS else ())

    def with_grain(self, x: Value, places: _Places, dtype: DType, unseen: bool = False) -> _Bounds:
        """These of an operand in f16 or bf16, with the grain of its rows, or `unseen` the one of all numbers of f16."""
        if unseen:
            return replace(self, grain=jnp.full_like(self.norm, _SMALLEST[dtype]))
        contracted = [i for i, label in enumerate(self.operand) if label in places.contracted]
        least = lax.convert_element_type(_bound_along(_size_or_infinite, lax.min, np.inf, x, contracted), jnp.float64)
        return replace(self, grain=lax.max(least * np.float64(2.0 ** -_PRECISION[dtype]), jnp.full_like(least, _SMALLEST[dtype])))

    def over(self, places: _Places, bound: Value) -> Value:
        """One of the bounds, repeated over the product."""
        order = sorted(range(len(self.axes)), key=lambda i: places.product.index(self.axes[i]))
        return lax.broadcast_in_dim(lax.transpose(bound, order), places.sizes, [places.product.index(self.axes[i]) for i in order])


def _bound_along(of: Callable[[Value], Value], combine: Callable[[Value, Value], Value], nothing: float, x: Value, axes: Axes) -> Value:
    """`of` the elements combined along axes, some of them twice: a bound. At first in pieces side by side, which XLA reads as they are: of
    a reduction it writes `of` all elements, and reads them one by one."""
    longest = max(axes, key=lambda axis: x.shape[axis])
    n = x.shape[longest]
    pieces = _pieces(n)
    length = -(-n // pieces)
    starts = [min(k * length, n - length) for k in range(pieces)]
    combined = functools.reduce(combine, [of(lax.slice_in_dim(x, start, start + length, axis=longest)) for start in starts])
    return lax.reduce(combined, np.float32(nothing), combine, axes)


def _pieces(n: int) -> int:
    """How many to make of an axis: as many as divide it, if they are not too few."""
    most = max(1, min(_PIECES, n // _LEAST_LENGTH))
    evenly = max(k for k in range(1, most + 1) if n % k == 0)
    return evenly if 2 * evenly >= most else most


def _size_or_infinite(x: Value) -> Value:
    """|x|, infinite for zeros."""
    size = lax.abs(x)
    return lax.select(lax.eq(size, jnp.zeros_like(size)), jnp.full_like(size, np.inf), size)


def _masks(x: Value, axes: Axes, places: _Places) -> tuple[Value, ...]:
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
    return tuple(_in_pieces(lax.bitwise_or, lax.reduce_or, word) for word in bits)


def _in_pieces(combine: Callable[[Value, Value], Value], reduce: Callable[[Value, Axes], Value], x: Value) -> Value:
    """x combined along its first axis, at first in pieces side by side, which XLA reads as they are."""
    n = x.shape[0]
    pieces = next(k for k in (8, 4, 2, 1) if n % k == 0)
    return reduce(functools.reduce(combine, [x[k * n // pieces : (k + 1) * n // pieces] for k in range(pieces)]), (0,))


def _are_exact(left: _Bounds, right: _Bounds) -> Value:
    """Whether the terms of every element are multiples of a number so large that float64 adds them without any rounding."""
    most = [lax.reduce_max(bounds.norm / bounds.grain, tuple(range(bounds.norm.ndim))) for bounds in (left, right)]
    return lax.lt(most[0] * most[1], np.float64(_EXACT))


def _doubtful(sums: Value, left: _Bounds, right: _Bounds, places: _Places) -> Value:
    """Where the order of adding could change the f32 result.

    That is where f32 rounding does not give the same bits all over sums +- slack; but not where they are exact (see `_are_exact`).
    """
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
    """Whether a sum is of more than zeros: one of those is exact in any order."""
    met = functools.reduce(lax.bitwise_or, words)
    return lax.ne(met, jnp.zeros_like(met))


def _several(words: Sequence[Value]) -> Value:
    """Whether more than one bit is set: a sum of one term is exact, too."""
    found, before = [], jnp.zeros_like(words[0])
    for word in words:
        found.append((word & (word - np.uint32(1))) | lax.select(lax.eq(word, jnp.zeros_like(word)), word, before))
        before = before | word
    return _any_bit(found)


def _mended(rounding: Rounding, result: Value, doubtful: Value, places: _Places, a: Value, b: Value) -> Value:
    """`result` with its doubtful elements summed again: of up to `_AT_ONCE` runs of `_RUN` elements, the last one each, in one trip.

    Until then such an element is a NaN that no result is, so that one pass over the sums makes both what is read and what is left to do.
    Elements of a run lie a run's number apart: whether one is left is found over all runs side by side.
    """
    count = result.size
    width = min(_RUN, count)
    runs = -(-count // width)
    hands = min(max(_AT_ONCE_LEAST, min(_AT_ONCE, _TERMS_AT_ONCE // places.terms)), runs)
    missing = runs * width - count
    bits = lax.bitcast_convert_type(result, jnp.int32)
    flat = lax.reshape(rounding.settled(lax.select(doubtful, jnp.full_like(bits, _DOUBTFUL), bits)), (count,))
    flat = lax.pad(flat, np.int32(0), [(0, missing, 0)]) if missing else flat

    def chosen(flat: Value, unfinished: Value) -> tuple[Value, ...]:
        """What is unfinished behind the next trip; the element that each hand takes, -1 for none; where its terms lie."""
        run = _first_few(unfinished, hands)
        idle = lax.lt(run, jnp.zeros_like(run))
        marks = _columns(lax.reshape(flat, (width, runs)), lax.max(run, jnp.zeros_like(run)))
        last = lax.reduce_max(lax.select(marks, lax.broadcasted_iota(jnp.int32, marks.shape, 0), jnp.full_like(marks, -1, np.int32)), (0,))
        more = lax.gt(lax.reduce_sum(lax.convert_element_type(marks, np.int32), (0,)), jnp.ones_like(run))
        place = lax.select(idle, jnp.full_like(run, -1), last * np.int32(runs) + run)
        unfinished = unfinished.at[lax.select(idle, jnp.full_like(run, runs), run)].set(more, mode="drop")
        return unfinished, place, places.starts(places.a_axes, place), places.starts(places.b_axes, place)

    def body(state: tuple[Value, ...]) -> tuple[Value, ...]:
        flat, unfinished, place, a_starts, b_starts = state
        terms = places.terms_of(a, places.a_axes, a_starts) * places.terms_of(b, places.b_axes, b_starts)
        sums = lax.bitcast_convert_type(rounding.narrow(_ascending(terms), F32), jnp.int32)
        flat = flat.at[lax.select(lax.lt(place, jnp.zeros_like(place)), jnp.full_like(place, flat.size), place)].set(sums, mode="drop")
        return flat, *chosen(flat, unfinished)

    state = flat, *chosen(flat, _holding(lax.reshape(flat, (width, runs))))
    flat, *_ = lax.while_loop(lambda state: jnp.any(state[2] >= 0), body, state)
    return lax.bitcast_convert_type(lax.reshape(flat[:count] if missing else flat, result.shape), jnp.float32)


def _columns(x: Value, which: Value) -> Value:
    """Whether elements of [N, R] are doubtful, of some columns: bool [N, C]."""
    numbers = lax.GatherDimensionNumbers((0,), (1,), (1,))
    found = lax.gather(x, which[:, None], numbers, (x.shape[0], 1), mode="promise_in_bounds")
    return lax.eq(found, jnp.full_like(found, _DOUBTFUL))


def _holding(bits: Value) -> Value:
    """bool [R]: whether a column of [N, R] has anything doubtful; at first in pieces side by side, which XLA reads as they are."""
    greatest = _in_pieces(lax.max, lax.reduce_max, bits)
    return lax.eq(greatest, jnp.full_like(greatest, _DOUBTFUL))


def _first_few(flags: Value, few: int) -> Value:
    """s32 [few]: places where bool [N] is set, at most one of each `_STRIPES`-th; -1 where there are no more."""
    stripes = max(few, min(_STRIPES, flags.size))
    depth = -(-flags.size // stripes)
    place = lax.reshape(lax.iota(jnp.int32, depth * stripes), (depth, stripes))
    dealt = lax.reshape(lax.pad(flags, np.False_, [(0, depth * stripes - flags.size, 0)]), (depth, stripes))
    found = lax.reduce(lax.select(dealt, place, jnp.full_like(place, -1)), np.int32(-1), lax.max, (0,))
    return lax.rev(lax.sort(found), (0,))[:few]


def _ascending(terms: Value) -> Value:
    """float64 [K, C] summed over axis 0, one term after the other (zeros added at the end change nothing)."""
    count = -(-terms.shape[0] // _ASCENDING)
    length = -(-terms.shape[0] // count)
    missing = count * length - terms.shape[0]
    terms = lax.pad(terms, np.float64(0), [(0, missing, 0), (0, 0, 0)]) if missing else terms
    chunks = lax.reshape(terms, (count, length, terms.shape[1]))

    def add_chunk(sums: Value, chunk: Value) -> tuple[Value, None]:
        for i in range(length):
            sums = sums + chunk[i]
        return sums, None

    return lax.scan(add_chunk, jnp.zeros(terms.shape[1], jnp.float64), chunks)[0]
