"""An oracle of the graph, for testing passes, rules and engines: whole arrays, no kernels or tiles, in the device's own arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tpuflow.dtypes import F32, DType
from tpuflow.errors import GraphError
from tpuflow.isa.numpy_rounding import narrow, widen
from tpuflow.lower.graph.blocking import is_ordered, sum_block
from tpuflow.lower.graph.conv import ConvLabels, Slide, product_labels
from tpuflow.lower.graph.elementwise import DEVICE, meaning
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.ops import ELEMENTWISE
from tpuflow.lower.graph.scalars import identity
from tpuflow.lower.graph.view import read, write

Array = np.ndarray
Items = Iterator[Sequence[Array]]


@dataclass(frozen=True, slots=True)
class Host:
    """The other end of the graph's infeed and outfeed ports, and who looks at every node's results."""

    infeed: Mapping[int, Items] = field(default_factory=dict)
    outfeed: MutableMapping[int, list[Array]] = field(default_factory=dict)
    seen: Callable[[Node, Sequence[Array]], None] | None = None


def interpret(
    graph: Graph,
    *arrays: Any,
    infeed: Mapping[int, Sequence[Sequence[Array]]] | None = None,
    outfeed: MutableMapping[int, list[Array]] | None = None,
    seen: Callable[[Node, Sequence[Array]], None] | None = None,
) -> tuple[Array, ...]:
    """Outputs of the graph on arrays that fit its inputs.

    `infeed` gives each port its items (one array per result of the infeed node); `outfeed` collects what each port sends.
    `seen` is called with every node and its results, those of regions too, whenever it has run.

    Raises:
      GraphError: an array does not fit its input, or an infeed port runs dry.
    """
    feeds = {port: iter(items) for port, items in (infeed or {}).items()}
    host = Host(feeds, {} if outfeed is None else outfeed, seen)
    with np.errstate(all="ignore"):
        return _run(graph, [np.asarray(a) for a in arrays], host)


def _run(graph: Graph, arrays: Sequence[Array], host: Host) -> tuple[Array, ...]:
    env: dict[Value, Array] = {}
    _bind(env, graph.inputs, arrays, f"input of graph {graph.name!r}")
    for node in graph.nodes:
        results = evaluate(node, [env[v] for v in node.inputs], host)
        _bind(env, node.results, results, node.op)
        if host.seen is not None:
            host.seen(node, results)
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
    if node.op in ELEMENTWISE:
        return (np.asarray(meaning(node.op, node.attrs, [v.dtype for v in node.inputs], node.result.dtype)(*args)),)
    return (np.asarray(_OTHER[node.op](node, *args)),)


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


def _wide(node: Node, x: Array) -> tuple[Array, DType]:
    """What is reduced, in the type in which that is done: narrow floats in f32."""
    dtype = node.inputs[0].dtype
    wide = F32 if dtype.is_float else dtype
    return DEVICE.convert(x, dtype, wide), wide


def _reduce(node: Node, x: Array) -> Array:
    axes, op, (wide, dtype) = node.attrs["axes"], node.attrs["op"], _wide(node, x)
    nothing = DEVICE.full(tuple(1 if i in axes else n for i, n in enumerate(x.shape)), identity(op, dtype), dtype)
    reduced = DEVICE.reduce(op, nothing, wide, axes, sum_block(x.shape, axes) if is_ordered(op, dtype) else x.size, dtype)
    return DEVICE.convert(reduced, dtype, node.result.dtype).reshape(node.result.shape)


def _cumulative(node: Node, x: Array) -> Array:
    axis, op, (wide, dtype) = node.attrs["axis"], node.attrs["op"], _wide(node, x)
    turned = np.flip(wide, axis) if node.attrs["reverse"] else wide
    nothing = DEVICE.full(tuple(1 if i == axis else n for i, n in enumerate(x.shape)), identity(op, dtype), dtype)
    values = DEVICE.convert(DEVICE.cumulative(op, nothing, turned, axis, dtype)[0], dtype, node.result.dtype)
    return np.flip(values, axis) if node.attrs["reverse"] else values


def _dot(node: Node, lhs: Array, rhs: Array) -> Array:
    labels = product_labels(node)
    return DEVICE.matmul(lhs, rhs, labels.lhs, labels.rhs, labels.out, node.inputs[0].dtype, node.result.dtype)


def _conv(node: Node, lhs: Array, rhs: Array) -> Array:
    labels, dtype = ConvLabels.of(node.attrs), node.inputs[0].dtype
    sizes = labels.sizes(lhs.shape, rhs.shape)
    patches, exists = lhs, np.ones(lhs.shape, bool)
    for slide in sorted(labels.slides, key=lambda s: -s.axis):
        patches, exists = (_slid(x, slide, sizes[slide.label]) for x in (patches, exists))
    if not dtype.is_float or (DEVICE.is_finite(lhs, dtype).all() and DEVICE.is_finite(rhs, dtype).all()):
        return DEVICE.matmul(patches, rhs, labels.patch, labels.rhs, labels.out, dtype, node.result.dtype)
    return _every_product(labels, widen(patches, dtype), widen(rhs, dtype), exists, sizes)


def _every_product(labels: ConvLabels, patches: Array, rhs: Array, exists: Array, sizes: Mapping[int, int]) -> Array:
    """The products that there are, of all sums at once: infinities and NaN meet no padding."""
    order = (*labels.out, *labels.contracted)
    there = _laid(exists, labels.patch, order)
    for bound in labels.bounds:
        along = (factor * _laid(np.arange(sizes[x]), (x,), order) for x, factor in bound.terms)
        there = there & bound.holds(bound.origin + sum(along))
    products = _laid(patches, labels.patch, order).astype(np.float64) * _laid(rhs, labels.rhs, order)
    return narrow(np.where(there, products, 0).sum(axis=tuple(range(len(labels.out), len(order)))), F32)


def _laid(x: Array, labels: Sequence[int], order: Sequence[int]) -> Array:
    """x with its axes where their labels are in `order`, and axes of size 1 for the others."""
    ranked = sorted(range(x.ndim), key=lambda i: order.index(labels[i]))
    sizes = {labels[i]: x.shape[i] for i in ranked}
    return x.transpose(ranked).reshape([sizes.get(label, 1) for label in order])


def _slid(x: Array, slide: Slide, inner: int) -> Array:
    """x with one axis as two: outer and inner positions of the slide; zero (false) where there is no element."""
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


def _scatter_rows(node: Node, x: Array, index: Array, updates: Array) -> Array:
    out, mode = x.copy(), node.attrs["mode"]
    for row, update in zip(index.tolist(), updates, strict=True):
        if 0 <= row < out.shape[0]:
            out[row] = update if mode == "set" else DEVICE.binary(mode, out[row], update, node.result.dtype)
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


def _sort(node: Node, args: list[Array], host: Host) -> Sequence[Array]:
    return DEVICE.sort(args, [v.dtype for v in node.inputs], node.attrs["axis"], node.attrs["keys"])


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
