"""Rules of reductions, whole and windowed, prefix scans and sorts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from string import ascii_lowercase
from typing import Any

from tpuflow.dtypes import PRED, DType
from tpuflow.jaxprs.batches import TOP_K
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.graph.scalars import identity
from tpuflow.lower.importers.stablehlo.expressions import joined
from tpuflow.lower.importers.stablehlo.walk import RULES, Region
from tpuflow.lower.operations import reductions, sorting, windows
from tpuflow.lower.operations.complex import Number
from tpuflow.lower.operations.forms import UnsupportedForm
from tpuflow.lower.operations.pooling_gradients import REDUCTIONS, select_and_scatter
from tpuflow.lower.operations.reducers import reduce_by, reduce_window_by
from tpuflow.lower.operations.window import Sizes, SlidingWindow

_MONOIDS = {
    "add(a, b)": "add", "multiply(a, b)": "mul", "maximum(a, b)": "max", "minimum(a, b)": "min", "and(a, b)": "and", "or(a, b)": "or",
    "xor(a, b)": "xor",
}  # fmt: skip
_PLACES = {
    tuple(text.format(op=op) for text in (
        "select(or({op}(a, c), ne(a, a)), a, c)",
        "select(or(and(eq(a, c), lt(b, d)), or({op}(a, c), ne(a, a))), b, d)",
    )): reduction
    for op, reduction in (("gt", "max"), ("lt", "min"))
}  # fmt: skip
"""JAX's reducers of `argmax` and `argmin`, on values a, c and indices b, d."""
_LOGADDEXP = (
    "select(ne(subtract(a, b), subtract(a, b)), add(a, b), add(log_plus_one(exponential(negate(abs(subtract(a, b))))), maximum(a, b)))"
)
_SELECTED = {"ge(a, b)": "ge", "le(a, b)": "le"}
_SCATTERED = {text: op for text, op in _MONOIDS.items() if op in ("add", "or", "xor")}
"""Reducers that may combine several sources of an element: those with the identity 0."""


def _halves(operands: Sequence[Value]) -> tuple[Sequence[Value], Sequence[Value]]:
    """Arrays and their starting values."""
    return operands[: len(operands) // 2], operands[len(operands) // 2 :]


def _start(b: Builder, op: str, start: Value) -> Value | None:
    """The starting value; None if it changes nothing."""
    return None if _is_known(b, start, _identity(op, start.dtype)) else start


def _identity(op: str, dtype: DType) -> bool | int | float:
    if dtype == PRED:
        return op in ("min", "and", "mul")
    return identity(op, dtype)


def _is_known(b: Builder, x: Value, value: bool | int | float) -> bool:
    return b.known(x) == value


@RULES.lowers("stablehlo.reduce")
def _reduce(b: Builder, *operands: Value, dimensions: Sizes, regions: tuple[Region]) -> tuple[Value, ...]:
    arrays, starts = _halves(operands)
    texts = regions[0].expressions()
    if (op := _MONOIDS.get(texts[0])) is not None and len(arrays) == 1:
        return (reductions.reduce(b, op, arrays[0], dimensions, _start(b, op, starts[0])),)
    if (op := _PLACES.get(texts)) is not None and _are_places(b, op, arrays, starts, dimensions):
        return _extreme_and_place(b, op, arrays, dimensions[0])
    return reduce_by(b, regions[0].elementwise, arrays, starts, dimensions)


def _are_places(b: Builder, op: str, arrays: Sequence[Value], starts: Sequence[Value], dimensions: Sizes) -> bool:
    """Whether the second array is an iota along the only reduced axis, and the starting values are identities."""
    made = b.maker(arrays[1])
    if made is not None and made.op == "convert":
        made = b.maker(made.inputs[0])
    numbered = made is not None and made.op == "iota" and dimensions == (made.attrs["axis"],)
    return numbered and _is_known(b, starts[0], _identity(op, starts[0].dtype)) and _is_known(b, starts[1], 0)


def _extreme_and_place(b: Builder, op: str, arrays: Sequence[Value], axis: int) -> tuple[Value, ...]:
    x, places = arrays
    return reductions.reduce(b, op, x, (axis,)), reductions.first_place_of(b, op, x, axis, places.dtype)


@RULES.lowers("stablehlo.reduce_window")
def _reduce_window(
    b: Builder, *operands: Value, regions: tuple[Region], window_dimensions: Sizes, window_strides: Sizes = (), padding: Any = None,
    base_dilations: Sizes = (), window_dilations: Sizes = (),
) -> tuple[Value, ...]:  # fmt: skip
    arrays, starts = _halves(operands)
    texts = regions[0].expressions()
    window = window_of(window_dimensions, window_strides, padding, base_dilations, window_dilations)
    if (op := _MONOIDS.get(texts[0])) is not None and len(arrays) == 1:
        return (windows.reduce_window(b, op, arrays[0], window, _start(b, op, starts[0])),)
    if texts == (_LOGADDEXP,) and _is_known(b, starts[0], -float("inf")):
        scan = windows.as_cumulative(arrays[0].shape, window)
        if scan is not None:
            return (reductions.cumlogsumexp(b, arrays[0], axis=scan[0], reverse=scan[1]),)
    return reduce_window_by(b, regions[0].elementwise, arrays, starts, window)


def window_of(sizes: Sizes, strides: Sizes, padding: Any, base_dilations: Sizes, window_dilations: Sizes) -> SlidingWindow:
    """A window of an operation's attributes, of which all but the sizes may be left out."""
    pads = [(0, 0)] * len(sizes) if padding is None else padding.tolist()
    return SlidingWindow.of(sizes, strides or (1,) * len(sizes), pads, base_dilations, window_dilations)


@RULES.lowers("stablehlo.select_and_scatter")
def _select_and_scatter(
    b: Builder, operand: Value, source: Value, start: Value, *, regions: tuple[Region, Region], window_dimensions: Sizes = (),
    window_strides: Sizes = (), padding: Any = None,
) -> Value:  # fmt: skip
    (select,), (scatter,) = regions[0].expressions(), regions[1].expressions()
    if select not in _SELECTED or scatter not in _SCATTERED:
        raise UnsupportedForm(
            f"it selects by {select or 'a longer computation'} and scatters by {scatter or 'one'}; there are ge and le, and add, or, xor"
        )
    op = _SCATTERED[scatter]
    window = window_of(window_dimensions or (1,) * len(operand.shape), window_strides, padding, (), ())
    result = _scattered(b, op, operand, source, _SELECTED[select], window)
    return result if _is_known(b, start, 0) else reductions.combine(b, op, b.splat(start, result.shape), result)


def _scattered(b: Builder, op: str, operand: Value, source: Value, select: str, window: SlidingWindow) -> Value:
    """select_and_scatter, with a pad of the operand by the selection's identity, as JAX writes it, folded into the window."""
    made = b.maker(operand)
    worst = _identity(REDUCTIONS[select], operand.dtype)
    if made is None or made.op != "pad" or any(made.attrs["interior"]) or not _is_known(b, made.inputs[1], worst):
        return select_and_scatter(b, source, operand, select, window, op=op)
    low, high = made.attrs["low"], made.attrs["high"]
    padding = [(a + more, z + further) for (a, z), more, further in zip(window.padding, low, high, strict=True)]
    inner = select_and_scatter(b, source, made.inputs[0], select, replace(window, padding=tuple(padding)), op=op)
    return b.pad(inner, 0, low, high)


@RULES.lowers("stablehlo.sort")
def _sort(b: Builder, *operands: Value, dimension: int, regions: tuple[Region]) -> tuple[Value, ...]:
    """Sort by one key or several with JAX's comparator, or by one key descending or in total order. Always stable."""
    (comparator,) = regions[0].expressions()
    axis = dimension % len(operands[0].shape)
    if keys := keys_of(operands, regions[0]):
        return sorting.sort(b, operands, axis, keys)
    if (key := _KEYS.get(comparator)) is not None:
        return sorting.sort_by(b, key(b, operands[0]), operands, axis)
    raise UnsupportedForm(
        f"it compares by {comparator or 'a longer computation'}; there are the orders of jnp.sort, lax.sort, a < b and a > b"
    )


def keys_of(operands: Sequence[Number], comparator: Region) -> int:
    """The number of leading operands that are keys, if the comparator is JAX's; 0 if it is another."""
    (text,) = comparator.expressions()
    return next((n for n in range(1, len(operands) + 1) if text == _ascending(operands[:n])), 0)


def _ascending(keys: Sequence[Number]) -> str:
    """The text of JAX's comparator for keys, the first of which is the most significant."""
    compared = [text for i, key in enumerate(keys) for text in _both_compared(key, *ascii_lowercase[2 * i : 2 * i + 2])]
    *firsts, last = compared
    text = f"lt{last}"
    for first in reversed(firsts):
        text = joined("or", joined("and", f"eq{first}", text), f"lt{first}")
    return text


def _both_compared(key: Number, x: str, y: str) -> list[str]:
    """The operands of comparisons of a key: of complex keys the real parts, then the imaginary parts."""
    if isinstance(key, Value):
        return [_compared(key, x, y)]
    return [_compared(plane, f"{part}({x})", f"{part}({y})") for part, plane in (("real", key.real), ("imag", key.imag))]


def _compared(key: Value, x: str, y: str) -> str:
    if not key.dtype.computed.is_float:
        return f"({x}, {y})"
    return f" in total order({_CANONICAL.format(x)}, {_CANONICAL.format(y)})"


_CANONICAL = "select(ne({0}, {0}), nan, select(eq({0}, 0.0), 0.0, {0}))"
"""How JAX canonicalises NaNs and zeros before it compares floats."""
_KEYS: dict[str, Callable[[Builder, Value], Value]] = {
    "lt(a, b)": lambda b, x: x,
    "gt(a, b)": sorting.descending_key,
    "lt in total order(a, b)": sorting.total_order_key,
    "gt in total order(a, b)": lambda b, x: b.not_(sorting.total_order_key(b, x)),
}
"""Other comparators -> the sort key (integer or float) that is ascending in their order."""


@RULES.lowers("mhlo.topk")
def _topk(b: Builder, x: Value, *, k: int, largest: bool = True) -> tuple[Value, Value]:
    """`chlo.top_k` after XLA's passes."""
    if not largest:
        raise UnsupportedForm("it wants the least, which chlo.top_k has not; give it the opposite numbers")
    return sorting.top_k(b, x, k=k, axis=-1)


@RULES.lowers("chlo.top_k")
def _top_k(b: Builder, x: Value, *, k: int) -> tuple[Value, Value]:
    return sorting.top_k(b, x, k=k, axis=-1)


@RULES.lowers(f"custom_call {TOP_K}")
def _called_top_k(b: Builder, x: Value, *, types: tuple[TensorType, TensorType]) -> tuple[Value, Value]:
    return sorting.top_k(b, x, k=types[0].shape[-1], axis=-1)


@RULES.lowers("stablehlo.map")
def _map(b: Builder, *operands: Value, regions: tuple[Region]) -> tuple[Value, ...]:
    return regions[0].elementwise(b, *operands)
