"""The bit-exact product of floats: float64 sums in ascending order of the contracted positions, rounded once."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.device.fast.lax_rounding import Rounding, materialized, started_from_zero, x64
from tpuflow.device.fast.product_bounds import SMALLEST, Bounds, are_exact, combined_in_pieces, doubtful_places
from tpuflow.device.fast.product_places import Axes, Places, Value, dot_dimensions
from tpuflow.dtypes import F32, DType
from tpuflow.isa.contraction import Contraction

_CHUNK = 16
_ASCENDING = 128
_AT_ONCE = 32
_AT_ONCE_LEAST = 8
_TERMS_AT_ONCE = 4096
_RUN = 64
_STRIPES = 128
_DIRECT_PRODUCTS = 1 << 16
_MANY_TERMS = 128
_DOUBTFUL = 0x7FFFD0B7  # bits of a NaN, as s32 greater than those of any number and of the canonical NaN


def ordered_product(rounding: Rounding, a: Value, b: Value, whole: Contraction, dtype: DType) -> Value:
    """f32 operands -> f32 product, the float64 sums taken in ascending order of the contracted positions.

    XLA's float64 dot adds in an order of its own (it depends on shapes, layouts and threads). Products of two f32 are exact in float64
    and two orders of adding K terms differ by at most 2 (K - 1) u sum|a b| <= 2 (K - 1) u |a| |b|, so nearly every sum rounds to the
    same f32 in any order; the others are found by that bound and added again in ascending order.
    """
    places = Places.of(whole, a, b)
    if places.terms <= _CHUNK or math.prod(places.sizes) * places.terms <= _DIRECT_PRODUCTS:
        with x64():
            return rounding.hide(_summed_directly(rounding, a, b, places))
    a, b = (_materialized_if_reused(x, places) for x in (a, b))
    turned, turned_whole = _terms_last(a, whole)
    if dtype != F32:  # bounds of f32 read the operand as it lies, which is quicker; those of the others what is there anyway
        a, whole, places = turned, turned_whole, Places.of(turned_whole, turned, b)
    with x64():
        wide_a, wide_b = lax.convert_element_type(turned, jnp.float64), lax.convert_element_type(b, jnp.float64)
        sums = lax.dot_general(wide_a, wide_b, dot_dimensions(turned_whole))
        left, right = Bounds.of(a, whole.lhs, places, dtype), Bounds.of(b, whole.rhs, places, dtype)
        read = (a, b) if dtype == F32 else (wide_a, wide_b)  # what is there anyway: f16 and bf16 would be widened to f32 for this alone

        def rounded(sums: Value) -> Value:
            return rounding.narrow(started_from_zero(sums), F32)

        def mended(left: Bounds, right: Bounds, sums: Value) -> Value:
            return _mended(rounding, rounded(sums), doubtful_places(sums, left, right, places), places, *read)

        if dtype == F32:
            return rounding.hide(mended(left, right, sums))
        unseen = [x.size > sums.size and SMALLEST[dtype] > 0 for x in (a, b)]  # all of a large operand is read only where that is needed
        known = [bounds.with_grain(x, places, dtype, unseen) for bounds, x, unseen in zip((left, right), (a, b), unseen, strict=True)]

        def looked_through(sums: Value) -> Value:
            found = [bounds.with_grain(x, places, dtype) if no else bounds for bounds, x, no in zip(known, (a, b), unseen, strict=True)]
            return lax.cond(are_exact(*found), rounded, functools.partial(mended, *found), sums)

        if not any(unseen):
            return rounding.hide(looked_through(sums))
        return rounding.hide(lax.cond(are_exact(*known), rounded, looked_through, sums))


def _materialized_if_reused(x: Value, places: Places) -> Value:
    """An operand, materialized if each of its elements is in many terms: the product, the bounds and the sums in ascending order all read
    it, and XLA would recompute it for each of them, one element at a time where they read it transposed."""
    return materialized(x) if math.prod(places.sizes) * places.terms >= _MANY_TERMS * x.size else x


def _terms_last(a: Value, whole: Contraction) -> tuple[Value, Contraction]:
    """The left operand with its contracted axes behind all others, and the contraction of it: XLA's float64 dot takes twice as long where
    it has to turn the left operand itself, 0.58 ms for [64, 784] by [64, 512] in place of 0.36. The barrier keeps it from doing so anyway:
    it would take the transposition into the dot."""
    order = sorted(range(a.ndim), key=lambda i: whole.lhs[i] in whole.contracted)
    if order == list(range(a.ndim)):
        return a, whole
    return lax.optimization_barrier(lax.transpose(a, order)), replace(whole, lhs=tuple(whole.lhs[i] for i in order))


def _summed_directly(rounding: Rounding, a: Value, b: Value, places: Places) -> Value:
    """Sums one term after the other, for all elements at once: quicker to compile, and to run if the sums are short.

    It is a loop of at least two trips even if one would do, since XLA recomputes in every reader what is not the result of a loop.
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
    return rounding.narrow(started_from_zero(add_terms(sums, (left[whole:], right[whole:]))[0]), F32)


def _mended(rounding: Rounding, result: Value, doubtful: Value, places: Places, a: Value, b: Value) -> Value:
    """`result` with its doubtful elements summed again in ascending order, in a loop.

    Doubtful elements are first marked by a NaN (`_DOUBTFUL`) that is no result, so that one pass writes both the results and the list of
    what is left to do. The elements are divided into runs of up to `_RUN`, element i being in run i % runs, so that all runs are searched
    by one reduction over rows. Each trip sums the last doubtful element of up to `_AT_ONCE` runs.
    """
    count = result.size
    width = min(_RUN, count)
    runs = -(-count // width)
    hands = min(max(_AT_ONCE_LEAST, min(_AT_ONCE, _TERMS_AT_ONCE // places.terms)), runs)
    missing = runs * width - count
    bits = lax.bitcast_convert_type(result, jnp.int32)
    flat = lax.reshape(materialized(lax.select(doubtful, jnp.full_like(bits, _DOUBTFUL), bits)), (count,))
    flat = lax.pad(flat, np.int32(0), [(0, missing, 0)]) if missing else flat

    def chosen(flat: Value, unfinished: Value) -> tuple[Value, ...]:
        """(runs that are unfinished after the next trip; the elements that it sums, -1 for none; where their terms begin in a and in b)."""
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
    """The marks of doubtful elements in columns `which` [C] of x [N, R]: bool [N, C]."""
    numbers = lax.GatherDimensionNumbers((0,), (1,), (1,))
    found = lax.gather(x, which[:, None], numbers, (x.shape[0], 1), mode="promise_in_bounds")
    return lax.eq(found, jnp.full_like(found, _DOUBTFUL))


def _holding(bits: Value) -> Value:
    """bool [R]: whether a column of [N, R] has a doubtful element."""
    greatest = combined_in_pieces(lax.max, lax.reduce_max, bits)
    return lax.eq(greatest, jnp.full_like(greatest, _DOUBTFUL))


def _first_few(flags: Value, few: int) -> Value:
    """s32 [few]: indices at which bool [N] is set, -1 for the rest; at most one of each residue modulo the number of stripes."""
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
