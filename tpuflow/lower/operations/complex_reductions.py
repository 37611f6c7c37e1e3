"""Ordering and reductions of complex numbers: extremes, products, prefix scans, arbitrary reducers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from tpuflow.dtypes import PRED, DType
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.operations import reducers, reductions
from tpuflow.lower.operations.complex import Complex, Number, Type, alike, as_complex, exp, mul, packed, planes
from tpuflow.lower.operations.complex_powers import log
from tpuflow.lower.operations.elementwise import maximum
from tpuflow.lower.operations.window import SlidingWindow


def extreme(b: Builder, x: Number, y: Number, *, op: str) -> Complex:
    """The larger ("max") or the smaller ("min") one: by the real part, then by the imaginary one; x where it is not a number."""
    x, y = alike(b, x, y)
    beyond = {"max": b.gt, "min": b.lt}[op]
    first = b.or_(beyond(x.real, y.real), b.and_(b.eq(x.real, y.real), beyond(x.imag, y.imag)))
    first = b.or_(first, b.or_(b.ne(x.real, x.real), b.ne(x.imag, x.imag)))
    return Complex(b.select(first, x.real, y.real), b.select(first, x.imag, y.imag))


def clamp(b: Builder, low: Number, x: Number, high: Number) -> Complex:
    """x between two numbers, as `extreme` orders them."""
    return extreme(b, extreme(b, low, x, op="max"), high, op="min")


def reduce_prod(b: Builder, x: Complex, *, axes: Sequence[int]) -> Complex:
    """The product over axes, in a halving tree."""

    def step(b: Builder, x: Complex, y: Complex) -> tuple[Complex]:
        return (mul(b, x, y),)

    (result,) = reduce_by(b, step, (x,), (Complex(b.scalar(1.0), b.scalar(0.0)),), axes)
    return as_complex(b, result)


def reduce_extreme(b: Builder, x: Complex, *, op: str, axes: Sequence[int]) -> Complex:
    """The largest ("max") or smallest ("min") element, as `extreme` orders them."""
    worst = math.inf if op == "min" else -math.inf

    def step(b: Builder, x: Complex, y: Complex) -> tuple[Complex]:
        return (extreme(b, x, y, op=op),)

    (result,) = reduce_by(b, step, (x,), (Complex(b.scalar(worst), b.scalar(worst)),), axes)
    return as_complex(b, result)


def first_place_of(b: Builder, op: str, x: Complex, axis: int, index_dtype: DType) -> Value:
    """The first position of the extreme element (`op`: max or min), as `extreme` orders them, or of the first that is not a number."""
    first = b.select(b.ne(x.imag, x.imag), math.nan, x.real)
    best = b.eq(first, reductions.along(b, b.reduce(op, first, (axis,)), x.shape, axis))
    second = b.select(best, x.imag, math.inf if op == "min" else -math.inf)
    found = b.and_(best, b.eq(second, reductions.along(b, b.reduce(op, second, (axis,)), x.shape, axis)))
    return reductions.first_true(b, b.or_(found, b.ne(first, first)), axis, index_dtype)


def _of_planes(body: Callable[..., Sequence[Number]], types: Sequence[Type]) -> Callable[..., list[Value]]:
    """A reducer of values that may be complex, as a reducer of their planes."""

    def step(b: Builder, *arrays: Value) -> list[Value]:
        return planes(body(b, *packed(arrays, [*types, *types])))

    return step


def reduce_by(
    b: Builder, body: Callable[..., Sequence[Number]], operands: Sequence[Number], starts: Sequence[Number], axes: Sequence[int]
) -> tuple[Number, ...]:
    """`reducers.reduce_by` of values that may be complex."""
    types = [x.type for x in operands]
    return packed(reducers.reduce_by(b, _of_planes(body, types), planes(operands), planes(starts), tuple(axes)), types)


def reduce_window_by(
    b: Builder, body: Callable[..., Sequence[Number]], operands: Sequence[Number], starts: Sequence[Number], window: SlidingWindow
) -> tuple[Number, ...]:
    """`reducers.reduce_window_by` of values that may be complex. Bodies never see two elements of the padding, as under XLA: what they make
    of two starting values need not be a third."""
    types = [x.type for x in operands]
    inside = b.full(TensorType(PRED, operands[0].shape), True)
    arrays, firsts = (*planes(operands), inside), (*planes(starts), b.scalar(False, PRED))
    return packed(reducers.reduce_window_by(b, _inside(_of_planes(body, types)), arrays, firsts, window)[:-1], types)


def _inside(body: Callable[..., Sequence[Value]]) -> Callable[..., list[Value]]:
    """A reducer with one more value, a pred that says whether the new values are elements or padding; padding is skipped."""

    def step(b: Builder, *arrays: Value) -> list[Value]:
        half = len(arrays) // 2
        *kept, before = arrays[:half]
        *new, inside = arrays[half:]
        found = body(b, *kept, *new)
        return [*(b.select(inside, x, y) for x, y in zip(found, kept, strict=True)), b.or_(before, inside)]

    return step


def cumprod(b: Builder, x: Complex, *, axis: int, reverse: bool) -> Complex:
    """Running products along an axis."""
    return _cumulative(b, mul, x, (1.0, 0.0), axis, reverse=reverse)


def cumulative_extreme(b: Builder, x: Complex, *, op: str, axis: int, reverse: bool) -> Complex:
    """The largest ("max") or smallest ("min") element so far along an axis, as `extreme` orders them."""
    worst = math.inf if op == "min" else -math.inf
    return _cumulative(b, functools.partial(extreme, op=op), x, (worst, worst), axis, reverse=reverse)


def cumlogsumexp(b: Builder, x: Complex, *, axis: int, reverse: bool) -> Complex:
    """Running logarithms of sums of exponentials along an axis."""
    return _cumulative(b, _log_of_sum, x, (-math.inf, 0.0), axis, reverse=reverse)


def _log_of_sum(b: Builder, x: Complex, y: Complex) -> Complex:
    """log(exp x + exp y), with the larger real part factored out so that nothing overflows."""
    most = maximum(b, x.real, y.real)
    most = b.select(b.is_finite(most), most, 0)
    first, second = (exp(b, Complex(b.sub(z.real, most), z.imag)) for z in (x, y))
    found = log(b, Complex(b.add(first.real, second.real), b.add(first.imag, second.imag)))
    return Complex(b.add(found.real, most), found.imag)


def _cumulative(
    b: Builder, step: Callable[..., Complex], x: Complex, identity: tuple[float, float], axis: int, *, reverse: bool
) -> Complex:
    """A prefix scan in doubling steps: after step k every position combines the 2^k elements that end at it."""
    shift = 1
    while shift < x.shape[axis]:
        by = -shift if reverse else shift
        low = [by if i == axis else 0 for i in range(len(x.shape))]
        moved = Complex(*(b.pad(p, fill, low, [-n for n in low]) for p, fill in zip((x.real, x.imag), identity, strict=True)))
        x, shift = step(b, x, moved), 2 * shift
    return x
