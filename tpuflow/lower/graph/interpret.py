"""A reference interpreter of graphs, the oracle of tests: whole arrays, no kernels or tiles, in the device's own arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tpuflow.errors import GraphError
from tpuflow.isa import philox
from tpuflow.isa.contraction import Contraction
from tpuflow.lower.graph.blocking import is_ordered, sum_block
from tpuflow.lower.graph.elementwise import DEVICE, meaning
from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.ops import ELEMENTWISE
from tpuflow.lower.graph.products import block_of, contraction_of, sizes_of
from tpuflow.lower.graph.scalars import identity
from tpuflow.lower.graph.view import read, write

Array = np.ndarray
Items = Iterator[Sequence[Array]]


@dataclass(frozen=True, slots=True)
class Host:
    """The host's side of infeed and outfeed ports, by port number; `observe` is called with every node and its results."""

    infeed: Mapping[int, Items] = field(default_factory=dict)
    outfeed: MutableMapping[int, list[Array]] = field(default_factory=dict)
    observe: Callable[[Node, Sequence[Array]], None] | None = None


def interpret(
    graph: Graph,
    *arrays: Any,
    infeed: Mapping[int, Sequence[Sequence[Array]]] | None = None,
    outfeed: MutableMapping[int, list[Array]] | None = None,
    observe: Callable[[Node, Sequence[Array]], None] | None = None,
) -> tuple[Array, ...]:
    """Outputs of the graph on arrays that fit its inputs.

    `infeed` gives each port its items (one array per result of the infeed node); `outfeed` collects what each port sends.
    `observe` is called with every node and its results, those of regions too, whenever it has run.

    Raises:
      GraphError: an array does not fit its input, or an infeed port runs dry.
    """
    feeds = {port: iter(items) for port, items in (infeed or {}).items()}
    host = Host(feeds, {} if outfeed is None else outfeed, observe)
    with np.errstate(all="ignore"):
        return _run(graph, [np.asarray(a) for a in arrays], host)


def _run(graph: Graph, arrays: Sequence[Array], host: Host) -> tuple[Array, ...]:
    env: dict[Value, Array] = {}
    _bind(env, graph.inputs, arrays, f"input of graph {graph.name!r}")
    for node in graph.nodes:
        results = evaluate(node, [env[v] for v in node.inputs], host)
        _bind(env, node.results, results, node.op)
        if host.observe is not None:
            host.observe(node, results)
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


def _random(node: Node, state: Array) -> Array:
    shape = node.result.shape
    numbers = np.arange(node.result.type.elems, dtype=np.uint32).reshape(shape)
    return philox.words(DEVICE, numbers, [np.broadcast_to(word, shape) for word in state])


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


def _reduce(node: Node, x: Array) -> Array:
    axes, op, dtype = node.attrs["axes"], node.attrs["op"], node.result.dtype
    nothing = DEVICE.full(tuple(1 if i in axes else n for i, n in enumerate(x.shape)), identity(op, dtype), dtype)
    block = sum_block(x.shape, axes) if is_ordered(op, dtype) else x.size
    return DEVICE.reduce(op, nothing, x, axes, block, dtype).reshape(node.result.shape)


def _cumulative(node: Node, x: Array) -> Array:
    axis, op, dtype = node.attrs["axis"], node.attrs["op"], node.result.dtype
    turned = np.flip(x, axis) if node.attrs["reverse"] else x
    nothing = DEVICE.full(tuple(1 if i == axis else n for i, n in enumerate(x.shape)), identity(op, dtype), dtype)
    values = DEVICE.cumulative(op, nothing, turned, axis, dtype)[0]
    return np.flip(values, axis) if node.attrs["reverse"] else values


def _product(node: Node, lhs: Array, rhs: Array) -> Array:
    """Sum the blocks of the contraction in order, each rounded once, as the matrix unit does."""
    whole, sizes, dtype, acc = contraction_of(node), sizes_of(node), node.inputs[0].dtype, node.result.dtype
    block = block_of(node)
    whole, rhs = _from_the_end(whole, rhs, sizes)
    patches, lhs_mask = _patches(whole, lhs, sizes)
    rhs_mask = whole.rhs_mask(rhs.shape, lambda label: 0, DEVICE.positions)
    rhs_mask = None if rhs_mask is None else np.broadcast_to(rhs_mask, rhs.shape)
    product, result = whole.of_patches(), DEVICE.full(node.result.shape, 0, acc)
    for starts in itertools.product(*(range(0, sizes[x], block[x] or 1) for x in whole.contracted)):
        pieces = {x: slice(start, start + block[x]) for x, start in zip(whole.contracted, starts, strict=True)}
        left, right = (tuple(pieces.get(x, slice(None)) for x in labels) for labels in (product.lhs, product.rhs))
        masks = lhs_mask[left], None if rhs_mask is None else rhs_mask[right]
        result = DEVICE.binary("add", result, DEVICE.matmul(patches[left], rhs[right], product, dtype, acc, *masks), acc)
    return result


def _from_the_end(whole: Contraction, rhs: Array, sizes: Mapping[int, int]) -> tuple[Contraction, Array]:
    """Flip a kernel that is read from its end (negative dilation), so that the order of the sum is the device's."""
    turned = {s.label: sizes[s.label] for s in whole.sliding if s.dilation < 0}
    sliding = tuple(replace(s, dilation=abs(s.dilation)) for s in whole.sliding)
    bounds = tuple(b.from_the_end(turned) for b in whole.bounds)
    return replace(whole, sliding=sliding, bounds=bounds), np.flip(rhs, tuple(whole.rhs.index(label) for label in turned))


def _patches(whole: Contraction, x: Array, sizes: Mapping[int, int]) -> tuple[Array, Array]:
    """(lhs with an axis for each label of its patches, zeros in the padding; the mask of its elements, false in the padding)."""
    mask = np.ones(x.shape, bool)
    for outer, s in reversed(whole.outer.items()):
        bound = whole.bound_of(s)
        assert bound is not None, "a sliding axis of the graph has a bound"
        place = np.add.outer(np.arange(sizes[outer]) * s.stride, np.arange(sizes[s.label]) * s.dilation) + bound.origin
        here, after = bound.holds(place), (1,) * (x.ndim - s.axis - 1)
        element = np.where(here, place // bound.dilation, 0)
        mask, x = (np.take(y, element, s.axis, mode="clip") for y in (mask, x))
        mask = mask & here.reshape(*here.shape, *after)
    return np.where(mask, x, np.zeros((), x.dtype)), mask


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
            raise GraphError(f"start {int(start)} of a piece of {size} is out of range of an axis of {n}: operations clamp starts")
    return tuple(slice(int(s), int(s) + size) for s, size in zip(starts, sizes, strict=True))


def _dynamic_slice(node: Node, x: Array, *starts: Array) -> Array:
    return x[_at(starts, node.attrs["sizes"], x.shape)]


def _dynamic_update_slice(node: Node, x: Array, update: Array, *starts: Array) -> Array:
    out = x.copy()
    out[_at(starts, update.shape, x.shape)] = update
    return out


def _alone(node: Node, x: Array) -> Array:
    """A collective, shard or unshard on a mesh of one chip: the operand."""
    chips = math.prod(node.attrs["sizes"]) if "sizes" in node.attrs else node.attrs["chips"]
    if chips != 1:
        raise GraphError(f"{node.op} is over {chips} chips; the oracle is one chip. Compare with the reference engine's.")
    return np.zeros_like(x) if node.attrs.get("kind") == "permute" and not node.attrs["pairs"] else x.reshape(node.result.shape)


def _device_put(node: Node, x: Array, *rest: Array) -> Array:
    if len(rest) < 2:
        return (x[int(rest[0])] if rest else x).reshape(node.result.shape)
    out, at = rest[0].copy(), int(rest[1])
    out[at] = x.reshape(out.shape[1:])
    return out


_OTHER: dict[str, Callable[..., Any]] = {
    "position": lambda node: np.int32(0),
    "await": lambda node, received, sent: received,
    **dict.fromkeys(("device_put", "start_put"), _device_put),
    "host_array": lambda node: np.zeros(node.result.shape, node.result.dtype.numpy),
    **dict.fromkeys(("collective", "start", "shard", "unshard"), _alone),
    "full": lambda node: np.full(node.result.shape, node.attrs["value"], node.result.dtype.numpy),
    "constant": lambda node: node.attrs["data"],
    "iota": _iota,
    "random": _random,
    "broadcast": _broadcast,
    "window": lambda node, x: read(x, node.attrs["view"], node.result.shape, node.attrs["fill"]),
    "join": _join,
    "host_input": lambda node, x: x,
    "reshape": lambda node, x: x.reshape(node.result.shape),
    "transpose": lambda node, x: x.transpose(node.attrs["permutation"]),
    "slice": lambda node, x: x[_slices(node)],
    "pad": _pad,
    "concatenate": lambda node, *parts: np.concatenate(parts, node.attrs["axis"]),
    "reverse": lambda node, x: np.flip(x, node.attrs["axes"]),
    "reduce": _reduce,
    "cumulative": _cumulative,
    "dot": _product,
    "conv": _product,
    "take_rows": _take_rows,
    "scatter_rows": _scatter_rows,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
}  # fmt: skip


# --- several results, regions, host ---------------------------------------------------------------------------------


def _sort(node: Node, args: list[Array], host: Host) -> Sequence[Array]:
    return DEVICE.sort(args, [v.dtype for v in node.inputs], node.attrs["axis"], node.attrs["keys"], node.attrs["count"])


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


def _call_host(node: Node, args: list[Array], host: Host) -> Sequence[Array]:
    return node.attrs["function"].answer(args)


_CONTROL: dict[str, Callable[[Node, list[Array], Host], Sequence[Array]]] = {
    "barrier": lambda node, args, host: args,
    "sort": _sort, "while": _while, "loop": _loop, "switch": _switch, "infeed": _infeed, "outfeed": _outfeed, "call_host": _call_host,
    "fused": lambda node, args, host: _run(node.regions[0], args, host),
}  # fmt: skip
