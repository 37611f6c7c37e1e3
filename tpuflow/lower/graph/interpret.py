"""A NumPy oracle of the graph, for testing passes and rules; plain floating point, the device's bits are defined in `isa.arithmetic`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tpuflow.dtypes import F32
from tpuflow.errors import GraphError
from tpuflow.lower.graph.conv import ConvLabels, Slide
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.view import read, write

Array = np.ndarray
Items = Iterator[Sequence[Array]]


@dataclass(frozen=True, slots=True)
class Host:
    """The other end of the graph's infeed and outfeed ports."""

    infeed: Mapping[int, Items] = field(default_factory=dict)
    outfeed: MutableMapping[int, list[Array]] = field(default_factory=dict)


def interpret(
    graph: Graph,
    *arrays: Any,
    infeed: Mapping[int, Sequence[Sequence[Array]]] | None = None,
    outfeed: MutableMapping[int, list[Array]] | None = None,
) -> tuple[Array, ...]:
    """Outputs of the graph on arrays that fit its inputs.

    `infeed` gives each port its items (one array per result of the infeed node); `outfeed` collects what each port sends.

    Raises:
      GraphError: an array does not fit its input, or an infeed port runs dry.
    """
    feeds = {port: iter(items) for port, items in (infeed or {}).items()}
    host = Host(feeds, {} if outfeed is None else outfeed)
    with np.errstate(all="ignore"):
        return _run(graph, [np.asarray(a) for a in arrays], host)


def _run(graph: Graph, arrays: Sequence[Array], host: Host) -> tuple[Array, ...]:
    env: dict[Value, Array] = {}
    _bind(env, graph.inputs, arrays, f"input of graph {graph.name!r}")
    for node in graph.nodes:
        _bind(env, node.results, evaluate(node, [env[v] for v in node.inputs], host), node.op)
    return tuple(env[v] for v in graph.outputs)


def _bind(env: dict[Value, Array], values: Sequence[Value], arrays: Sequence[Array], where: str) -> None:
    if len(values) != len(arrays):
        raise GraphError(f"{where}: {len(values)} values expected, {len(arrays)} given")
    for value, array in zip(values, arrays, strict=True):
        if array.shape != value.shape or array.dtype != value.dtype.numpy:
            raise GraphError(f"{where}: {value.type} expected, {array.dtype}{list(array.shape)} given")
        env[value] = array


def evaluate(node: Node, args: list[Array], host: Host | None = None) -> Sequence[Array]:
    """Results of one node on the values of its operands."""
    if node.op in _CONTROL:
        return _CONTROL[node.op](node, args, host or Host())
    if node.op in _UNARY:
        return (_rounded(_UNARY[node.op], args[0]),)
    if node.op in _BINARY:
        return (_rounded(_BINARY[node.op], *args),)
    return (np.asarray(_OTHER[node.op](node, *args)),)


def _rounded(function: Callable[..., Any], *args: Array) -> Array:
    """Floats computed in float64 and rounded once; integers in their own type."""
    dtype = args[0].dtype
    if dtype.kind in "iub":
        return np.asarray(function(*args)).astype(dtype)
    return np.asarray(function(*(a.astype(np.float64) for a in args))).astype(np.float32 if dtype == np.float32 else dtype)


# --- elementwise ----------------------------------------------------------------------------------------------------


def _round_away(x: Array) -> Array:
    return np.where(np.abs(x) < 2.0**52, np.copysign(np.floor(np.abs(x) + 0.5), x), x)


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[np.float64])(x) if x.size else x


def _clz(x: Array) -> Array:
    bits = x.astype(np.uint64) & np.uint64((1 << 8 * x.dtype.itemsize) - 1)
    return 8 * x.dtype.itemsize - np.ceil(np.log2(bits.astype(np.float64) + 1)).astype(np.int64)


def _truncated_div(a: Array, b: Array) -> Array:
    """Towards zero; x / 0 is -1 (all ones), as XLA has it."""
    if a.dtype.kind == "f":
        return np.divide(a, b)
    wide, divisor = a.astype(np.int64), np.where(b == 0, 1, b).astype(np.int64)
    return np.where(b == 0, -1, np.sign(wide) * np.sign(divisor) * (np.abs(wide) // np.abs(divisor)))


def _rem(a: Array, b: Array) -> Array:
    """Sign of the dividend; x rem 0 is x for integers."""
    if a.dtype.kind == "f":
        return np.fmod(a, b)
    wide, divisor = a.astype(np.int64), np.where(b == 0, 1, b).astype(np.int64)
    return np.where(b == 0, wide, np.fmod(wide, divisor))


def _unsigned(x: Array) -> Array:
    return x.view(f"u{x.dtype.itemsize}")


def _shift(a: Array, b: Array, function: Callable[[Array, Array], Array], beyond: Any) -> Array:
    """`function` for amounts below the width, `beyond` otherwise."""
    width = 8 * a.dtype.itemsize
    amount = _unsigned(b)
    return np.where(amount < width, function(a, np.minimum(amount, width - 1).astype(a.dtype)), beyond)


def _shl(a: Array, b: Array) -> Array:
    return _shift(_unsigned(a), _unsigned(b), np.left_shift, 0).view(a.dtype)


def _shr_logical(a: Array, b: Array) -> Array:
    return _shift(_unsigned(a), _unsigned(b), np.right_shift, 0).view(a.dtype)


def _shr_arithmetic(a: Array, b: Array) -> Array:
    signed = a.view(f"i{a.dtype.itemsize}")
    return _shift(signed, b.view(signed.dtype), np.right_shift, signed >> (8 * a.dtype.itemsize - 1)).view(a.dtype)


def _mulhi(a: Array, b: Array) -> Array:
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    return (a.astype(wide) * b.astype(wide)) >> wide(8 * a.dtype.itemsize)


_UNARY: dict[str, Callable[[Array], Any]] = {
    "neg": np.negative, "abs": np.abs, "floor": np.floor, "ceil": np.ceil, "round_even": np.rint, "round_away": _round_away,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt, "exp": np.exp, "expm1": np.expm1, "log": np.log,
    "log1p": np.log1p, "tanh": np.tanh, "sin": np.sin, "cos": np.cos, "erf": _erf, "not": np.invert,
    "popcnt": lambda x: np.bitwise_count(_unsigned(x)), "clz": _clz,
}  # fmt: skip
_BINARY: dict[str, Callable[[Array, Array], Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _truncated_div, "rem": _rem, "pow": np.power, "atan2": np.arctan2,
    "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "shl": _shl, "shr_logical": _shr_logical, "shr_arithmetic": _shr_arithmetic, "mulhi": _mulhi,
}  # fmt: skip
_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def _convert(node: Node, x: Array) -> Array:
    """Float to integer truncates and saturates, NaN gives 0; the rest as NumPy rounds or wraps."""
    dtype = node.result.dtype
    if x.dtype.kind in "iub" or dtype.is_float:
        return x.astype(np.float32).astype(dtype.numpy) if dtype.bytes == 2 and dtype.is_float else x.astype(dtype.numpy)
    bounds = np.iinfo(dtype.numpy)
    wide = np.nan_to_num(x.astype(np.float64), nan=0.0)
    return np.clip(np.trunc(wide), bounds.min, bounds.max).astype(dtype.numpy)


# --- making and moving ----------------------------------------------------------------------------------------------


def _iota(node: Node) -> Array:
    shape, axis = node.result.shape, node.attrs["axis"]
    along = np.arange(shape[axis]).astype(node.result.dtype.numpy)
    return np.broadcast_to(along.reshape([-1 if i == axis else 1 for i in range(len(shape))]), shape)


def _broadcast(node: Node, x: Array) -> Array:
    axes, shape = node.attrs["axes"], node.result.shape
    order = sorted(range(len(axes)), key=lambda i: axes[i])
    sizes = {axes[i]: x.shape[i] for i in order}
    return np.broadcast_to(x.transpose(order).reshape([sizes.get(i, 1) for i in range(len(shape))]), shape)


def _slices(node: Node) -> tuple[slice, ...]:
    return tuple(map(slice, node.attrs["start"], node.attrs["limit"], node.attrs["stride"]))


def _pad(node: Node, x: Array, value: Array) -> Array:
    low, high, interior = (node.attrs[k] for k in ("low", "high", "interior"))
    spread = [n + max(n - 1, 0) * i for n, i in zip(x.shape, interior, strict=True)]
    out = np.full([n + max(lo, 0) + max(hi, 0) for n, lo, hi in zip(spread, low, high, strict=True)], value, x.dtype)
    inner = tuple(slice(max(lo, 0), max(lo, 0) + n, i + 1) for n, lo, i in zip(spread, low, interior, strict=True))
    out[inner] = x
    return out[tuple(slice(max(-lo, 0), n - max(-hi, 0)) for n, lo, hi in zip(out.shape, low, high, strict=True))]


def _join(node: Node, *pieces: Array) -> Array:
    out = np.empty(node.result.shape, pieces[0].dtype)
    for view, piece in zip(node.attrs["views"], pieces, strict=True):
        write(out, view, piece)
    return out


def _accumulator(dtype: np.dtype) -> np.dtype:
    """Sums and products of narrow floats are kept in f32."""
    return dtype if dtype.kind in "iub" else np.dtype(np.float32)


_REDUCE: dict[str, np.ufunc] = {
    "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


def _reduce(node: Node, x: Array) -> Array:
    wide = x.astype(_accumulator(x.dtype))
    return np.asarray(_REDUCE[node.attrs["op"]].reduce(wide, axis=node.attrs["axes"])).astype(x.dtype)


def _cumulative(node: Node, x: Array) -> Array:
    axis = node.attrs["axis"]
    turned = np.flip(x, axis) if node.attrs["reverse"] else x
    wide = _REDUCE[node.attrs["op"]].accumulate(turned.astype(_accumulator(x.dtype)), axis=axis).astype(x.dtype)
    return np.flip(wide, axis) if node.attrs["reverse"] else wide


def _dot(node: Node, lhs: Array, rhs: Array) -> Array:
    attrs, dtype = node.attrs, node.result.dtype.numpy
    labels = iter(range(lhs.ndim + rhs.ndim))
    left = [next(labels) for _ in lhs.shape]
    right = [next(labels) for _ in rhs.shape]
    for kind in ("contract", "batch"):
        for i, j in zip(attrs[f"lhs_{kind}"], attrs[f"rhs_{kind}"], strict=True):
            right[j] = left[i]
    batch = [left[i] for i in attrs["lhs_batch"]]
    gone = {left[i] for i in attrs["lhs_contract"]} | set(batch)
    out = batch + [i for i in left if i not in gone] + [i for i in right if i not in gone]
    wide = np.float64 if node.result.dtype == F32 else np.int64
    product = np.einsum(lhs.astype(wide), left, rhs.astype(wide), right, out, optimize=True)  # pyright: ignore
    return np.asarray(product).astype(dtype)


def _conv(node: Node, lhs: Array, rhs: Array) -> Array:
    labels, dtype = ConvLabels.of(node.attrs), node.result.dtype.numpy
    sizes = labels.sizes(lhs.shape, rhs.shape)
    wide = np.float64 if node.result.dtype == F32 else np.int64
    patches = lhs.astype(wide)
    for slide in sorted(labels.slides, key=lambda s: -s.axis):
        patches = _slid(patches, slide, sizes[slide.label])
    product = np.einsum(patches, labels.patch, rhs.astype(wide), labels.rhs, labels.out, optimize=True)  # pyright: ignore
    return np.asarray(product).astype(dtype)


def _slid(x: Array, slide: Slide, inner: int) -> Array:
    """x with one axis as two: outer and inner positions of the slide."""
    position = np.add.outer(np.arange(slide.size) * slide.stride, np.arange(inner) * slide.dilation) - slide.low
    element, n = position // slide.interior, x.shape[slide.axis]
    exists = (element * slide.interior == position) & (element >= 0) & (element < n)
    after = (1,) * (x.ndim - slide.axis - 1)
    if n == 0:
        return np.zeros((*x.shape[: slide.axis], *position.shape, *x.shape[slide.axis + 1 :]), x.dtype)
    return np.where(exists.reshape(*exists.shape, *after), np.take(x, np.where(exists, element, 0), slide.axis), 0).astype(x.dtype)


def _take_rows(node: Node, x: Array, index: Array) -> Array:
    inside = (index >= 0) & (index < x.shape[0])
    rows = x[np.where(inside, index, 0)]
    return np.where(inside.reshape(-1, *[1] * (x.ndim - 1)), rows, np.asarray(node.attrs["fill"]).astype(x.dtype))


_SCATTER: dict[str, Callable[[Array, Array], Array]] = {
    "set": lambda old, new: new, "add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum,
}  # fmt: skip


def _scatter_rows(node: Node, x: Array, index: Array, updates: Array) -> Array:
    out = x.copy()
    for row, update in zip(index.tolist(), updates, strict=True):
        if 0 <= row < out.shape[0]:
            out[row] = _SCATTER[node.attrs["mode"]](out[row], update)
    return out


def _at(starts: tuple[Array, ...], sizes: Sequence[int], shape: tuple[int, ...]) -> tuple[slice, ...]:
    for start, size, n in zip(starts, sizes, shape, strict=True):
        if not 0 <= int(start) <= n - size:
            raise GraphError(f"start {int(start)} of a piece of {size} is out of range of an axis of {n}: the frontend clamps starts")
    return tuple(slice(int(s), int(s) + size) for s, size in zip(starts, sizes, strict=True))


def _dynamic_slice(node: Node, x: Array, *starts: Array) -> Array:
    return x[_at(starts, node.attrs["sizes"], x.shape)]


def _dynamic_update_slice(node: Node, x: Array, update: Array, *starts: Array) -> Array:
    out = x.copy()
    out[_at(starts, update.shape, x.shape)] = update
    return out


_OTHER: dict[str, Callable[..., Any]] = {
    "is_finite": lambda node, x: np.isfinite(x.astype(np.float32)),
    "compare": lambda node, a, b: _COMPARE[node.attrs["direction"]](a, b),
    "select": lambda node, p, a, b: np.where(p, a, b),
    "convert": _convert,
    "bitcast": lambda node, x: x.view(node.result.dtype.numpy),
    "full": lambda node: np.full(node.result.shape, node.attrs["value"], node.result.dtype.numpy),
    "constant": lambda node: node.attrs["data"],
    "iota": _iota,
    "broadcast": _broadcast,
    "window": lambda node, x: read(x, node.attrs["view"], node.result.shape, node.attrs["fill"]),
    "join": _join,
    "reshape": lambda node, x: x.reshape(node.result.shape),
    "transpose": lambda node, x: x.transpose(node.attrs["permutation"]),
    "slice": lambda node, x: x[_slices(node)],
    "pad": _pad,
    "concatenate": lambda node, *parts: np.concatenate(parts, node.attrs["axis"]),
    "reverse": lambda node, x: np.flip(x, node.attrs["axes"]),
    "reduce": _reduce,
    "cumulative": _cumulative,
    "dot": _dot,
    "conv": _conv,
    "take_rows": _take_rows,
    "scatter_rows": _scatter_rows,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
}  # fmt: skip


# --- several results, regions, host ---------------------------------------------------------------------------------


def _ordered(x: Array) -> Array:
    """A key whose plain order is the device's: -0 equals 0, NaN last."""
    return x.astype(np.float64) + 0.0 if x.dtype.kind not in "iub" else x


def _sort(node: Node, args: list[Array], host: Host) -> list[Array]:
    axis, keys = node.attrs["axis"], node.attrs["keys"]
    order = np.arange(args[0].shape[axis]).reshape([-1 if i == axis else 1 for i in range(args[0].ndim)])
    order = np.broadcast_to(order, args[0].shape)
    for key in reversed(args[:keys]):
        again = np.argsort(np.take_along_axis(_ordered(key), order, axis), axis, kind="stable")
        order = np.take_along_axis(order, again, axis)
    return [np.take_along_axis(a, order, axis) for a in args]


def _while(node: Node, args: list[Array], host: Host) -> Sequence[Array]:
    condition, body = node.regions
    while _run(condition, args, host)[0]:
        args = list(_run(body, args, host))
    return args


def _loop(node: Node, args: list[Array], host: Host) -> Sequence[Array]:
    trips, *carries = args
    for _ in range(int(trips)):
        carries = list(_run(node.regions[0], carries, host))
    return carries


def _switch(node: Node, args: list[Array], host: Host) -> Sequence[Array]:
    index, *operands = args
    return _run(node.regions[int(np.clip(index, 0, len(node.regions) - 1))], operands, host)


def _infeed(node: Node, args: list[Array], host: Host) -> Sequence[Array]:
    item = next(host.infeed.get(node.attrs["port"], iter(())), None)
    if item is None:
        raise GraphError(f"infeed port {node.attrs['port']} has run dry")
    return [np.asarray(a) for a in item]


def _outfeed(node: Node, args: list[Array], host: Host) -> Sequence[Array]:
    host.outfeed.setdefault(node.attrs["port"], []).append(args[0])
    return ()


_CONTROL: dict[str, Callable[[Node, list[Array], Host], Sequence[Array]]] = {
    "barrier": lambda node, args, host: args,
    "sort": _sort, "while": _while, "loop": _loop, "switch": _switch, "infeed": _infeed, "outfeed": _outfeed,
    "fused": lambda node, args, host: _run(node.regions[0], args, host),
}  # fmt: skip
