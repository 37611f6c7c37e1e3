"""The operations of the graph: one row each, with arity, attributes and the rule that types the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tpuflow.dtypes import F32, PRED, S32, DType
from tpuflow.dtypes import from_numpy as dtype_of
from tpuflow.errors import GraphError
from tpuflow.isa.collectives import KINDS, REDUCERS
from tpuflow.isa.elementwise import BINARY, COMPARE, CUMULATIVE, REDUCE, UNARY
from tpuflow.lower.graph.graph import Graph, TensorType
from tpuflow.lower.graph.products import PRECISIONS, conv_problem
from tpuflow.lower.graph.view import problem

JOINED = ("slice", "concatenate", "transpose", "reverse")
"""Beside maps and reductions, what may be one of several that run together."""
PRODUCTS = ("dot", "conv")
SCATTER_MODES = ("set", "add", "mul", "min", "max")

ARITHMETIC = ("float", "int", "uint")
FLOAT = ("float",)


@dataclass(frozen=True, slots=True)
class Call:
    """What a typing rule sees: operand types, attributes, nested graphs, and the result types asked for (empty: to be inferred)."""

    op: str
    inputs: tuple[TensorType, ...]
    attrs: Mapping[str, Any]
    regions: tuple[Graph, ...]
    asked: tuple[TensorType, ...]

    def require(self, condition: bool, message: str) -> None:
        """Raise GraphError unless `condition` holds."""
        if not condition:
            raise self.error(message)

    def error(self, message: str) -> GraphError:
        """What is wrong with the operation: for messages that are put together only when they are needed."""
        return GraphError(f"{self.op}({', '.join(map(str, self.inputs))}) {dict(self.attrs)}: {message}")

    def require_kind(self, dtype: DType, kinds: Collection[str]) -> None:
        """Raise GraphError unless the element type is of one of the kinds."""
        if dtype.kind not in kinds:
            raise self.error(f"is not defined on {dtype}; it takes element types of kind {', '.join(kinds)}")

    def asked_type(self) -> TensorType:
        """The one result type that must be given, because the operands do not determine it."""
        self.require(len(self.asked) == 1, "its one result type must be given")
        return self.asked[0]


Types = tuple[TensorType, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """An operation: number of operands (None: any), names of its attributes, number of regions (None: any), typing rule.

    `typing` returns the result types or raises GraphError. `effect` marks what must never be removed or reordered.
    """

    name: str
    arity: int | None
    attrs: tuple[str, ...]
    typing: Callable[[Call], Types]
    regions: int | None = 0
    elementwise: bool = False
    effect: bool = False


def infer(op: str, inputs: Types, attrs: Mapping[str, Any], regions: tuple[Graph, ...] = (), asked: Types = ()) -> Types:
    """The result types of one operation.

    Raises:
      GraphError: unknown operation, wrong number of operands, attributes or regions, or types that do not fit.
    """
    call = Call(op, inputs, attrs, regions, asked)
    row = OPS.get(op)
    if row is None:
        raise GraphError(f"unknown operation {op!r}")
    if row.arity is not None and len(inputs) != row.arity:
        raise call.error(f"takes {row.arity} operands, not {len(inputs)}")
    if attrs.keys() != set(row.attrs):
        raise call.error(f"takes the attributes {row.attrs}, not {tuple(attrs)}")
    if row.regions is not None and len(regions) != row.regions:
        raise call.error(f"takes {row.regions} regions, not {len(regions)}")
    return row.typing(call)


def _all_equal(call: Call, types: Types) -> None:
    call.require(all(t is types[0] or t == types[0] for t in types[1:]), "its operands must be of one type")


def _unary(call: Call) -> Types:
    (x,) = call.inputs
    call.require_kind(x.dtype, UNARY[call.op].on)
    return (x,)


def _is_finite(call: Call) -> Types:
    (x,) = call.inputs
    call.require_kind(x.dtype, FLOAT)
    return (TensorType(PRED, x.shape),)


def _binary(call: Call) -> Types:
    _all_equal(call, call.inputs)
    call.require_kind(call.inputs[0].dtype, BINARY[call.op].on)
    return call.inputs[:1]


def _compare(call: Call) -> Types:
    _all_equal(call, call.inputs)
    if call.attrs["direction"] not in COMPARE:
        raise call.error(f"direction is one of {tuple(COMPARE)}")
    call.require_kind(call.inputs[0].dtype, ARITHMETIC)
    return (TensorType(PRED, call.inputs[0].shape),)


def _select(call: Call) -> Types:
    pred, on_true, on_false = call.inputs
    _all_equal(call, (on_true, on_false))
    call.require(pred == TensorType(PRED, on_true.shape), "the condition must be a pred of the result's shape")
    return (on_true,)


def _convert(call: Call) -> Types:
    result = call.asked_type()
    call.require(result.shape == call.inputs[0].shape, "keeps the shape")
    call.require(result.dtype != PRED, "does not convert to pred: compare with zero instead")
    return (result,)


def _bitcast(call: Call) -> Types:
    result = call.asked_type()
    (x,) = call.inputs
    call.require(result.shape == x.shape and result.dtype.bits == x.dtype.bits >= 8, "keeps shape and width, of whole bytes")
    call.require(PRED not in (result.dtype, x.dtype), "is not defined on pred")
    return (result,)


def _full(call: Call) -> Types:
    call.require(isinstance(call.attrs["value"], (bool, int, float)), "value is a Python scalar")
    return (call.asked_type(),)


def _constant(call: Call) -> Types:
    data = call.attrs["data"]
    return (TensorType(dtype_of(data.dtype), tuple(data.shape)),)


def _window(call: Call) -> Types:
    result = call.asked_type()
    (x,) = call.inputs
    wrong = problem(call.attrs["view"], x.elems, result.shape)
    call.require(not wrong and x.dtype == result.dtype, wrong or "keeps the element type")
    return (result,)


def _join(call: Call) -> Types:
    result, views = call.asked_type(), call.attrs["views"]
    _all_equal(call, call.inputs)
    call.require(len(views) == len(call.inputs) > 0, "takes at least one piece, and a view for each")
    piece = call.inputs[0]
    wrong = next(filter(None, (problem(v, result.elems, piece.shape) for v in views)), "")
    call.require(not wrong and piece.dtype == result.dtype, wrong or "keeps the element type")
    placed = sum(math.prod(len(v.places(piece.shape[v.axis])[0]) for v in view) for view in views)
    if placed != result.elems:
        raise call.error(f"its pieces fill {placed} of {result.elems} elements")
    return (result,)


def _iota(call: Call) -> Types:
    result = call.asked_type()
    call.require_kind(result.dtype, ARITHMETIC)
    _axes(call, (call.attrs["axis"],), len(result.shape))
    return (result,)


def _axes(call: Call, axes: tuple[int, ...], rank: int) -> None:
    good = len(set(axes)) == len(axes) and all(0 <= a < rank for a in axes)
    if not good:
        raise call.error(f"axes {axes} must be different and below {rank}")


def _broadcast(call: Call) -> Types:
    result = call.asked_type()
    (x,) = call.inputs
    axes = call.attrs["axes"]
    _axes(call, axes, len(result.shape))
    call.require(x.dtype == result.dtype and len(axes) == len(x.shape), "keeps the type; one axis for each operand axis")
    fits = all(n in (1, result.shape[a]) for n, a in zip(x.shape, axes, strict=True))
    if not fits:
        raise call.error(f"operand axes must be 1 or fit the result {result}")
    return (result,)


def _reshape(call: Call) -> Types:
    result = call.asked_type()
    if not (result.dtype == call.inputs[0].dtype and result.elems == call.inputs[0].elems):
        raise call.error(f"cannot become {result}")
    return (result,)


def _transpose(call: Call) -> Types:
    (x,) = call.inputs
    permutation = call.attrs["permutation"]
    call.require(sorted(permutation) == list(range(len(x.shape))), "permutation must name every axis once")
    return (TensorType(x.dtype, tuple(x.shape[p] for p in permutation)),)


def _slice(call: Call) -> Types:
    (x,) = call.inputs
    start, limit, stride = (call.attrs[k] for k in ("start", "limit", "stride"))
    good = len(start) == len(limit) == len(stride) == len(x.shape) and all(
        0 <= lo <= hi <= n and step >= 1 for lo, hi, step, n in zip(start, limit, stride, x.shape, strict=True)
    )
    call.require(good, "0 <= start <= limit <= size and stride >= 1 on every axis")
    shape = tuple(-(-(hi - lo) // step) for lo, hi, step in zip(start, limit, stride, strict=True))
    return (TensorType(x.dtype, shape),)


def _pad(call: Call) -> Types:
    x, value = call.inputs
    low, high, interior = (call.attrs[k] for k in ("low", "high", "interior"))
    call.require(value == TensorType(x.dtype), "the padding value is 0-d and of the operand's element type")
    call.require(len(low) == len(high) == len(interior) == len(x.shape), "one amount for each axis")
    call.require(all(i >= 0 for i in interior), "interior padding is not negative")
    shape = tuple(n + max(n - 1, 0) * i + lo + hi for n, lo, hi, i in zip(x.shape, low, high, interior, strict=True))
    call.require(all(n >= 0 for n in shape), "the result may not have a negative size")
    return (TensorType(x.dtype, shape),)


def _concatenate(call: Call) -> Types:
    axis = call.attrs["axis"]
    call.require(bool(call.inputs), "takes at least one operand")
    first = call.inputs[0]
    _axes(call, (axis,), len(first.shape))
    rest = {(t.dtype, t.shape[:axis], t.shape[axis + 1 :]) for t in call.inputs}
    if len(rest) != 1:
        raise call.error(f"operands may differ along axis {axis} only")
    total = sum(t.shape[axis] for t in call.inputs)
    return (TensorType(first.dtype, (*first.shape[:axis], total, *first.shape[axis + 1 :])),)


def _reverse(call: Call) -> Types:
    _axes(call, call.attrs["axes"], len(call.inputs[0].shape))
    return call.inputs


def _reduce(call: Call) -> Types:
    (x,) = call.inputs
    op, axes = call.attrs["op"], call.attrs["axes"]
    if op not in REDUCE:
        raise call.error(f"op is one of {tuple(REDUCE)}")
    call.require_kind(x.dtype, BINARY[op].on)
    _axes(call, axes, len(x.shape))
    return (TensorType(x.dtype, tuple(n for i, n in enumerate(x.shape) if i not in axes)),)


def _cumulative(call: Call) -> Types:
    (x,) = call.inputs
    if call.attrs["op"] not in CUMULATIVE:
        raise call.error(f"op is one of {tuple(CUMULATIVE)}")
    call.require_kind(x.dtype, ARITHMETIC)
    _axes(call, (call.attrs["axis"],), len(x.shape))
    return (x,)


def dot_shape(lhs: tuple[int, ...], rhs: tuple[int, ...], attrs: Mapping[str, Any]) -> tuple[int, ...]:
    """Shape of a dot: batch axes, free axes of lhs, free axes of rhs."""
    lhs_used = (*attrs["lhs_contract"], *attrs["lhs_batch"])
    rhs_used = (*attrs["rhs_contract"], *attrs["rhs_batch"])
    lhs_free = tuple(n for i, n in enumerate(lhs) if i not in lhs_used)
    rhs_free = tuple(n for i, n in enumerate(rhs) if i not in rhs_used)
    return tuple(lhs[i] for i in attrs["lhs_batch"]) + lhs_free + rhs_free


def _factors(call: Call) -> Types:
    """The operands of a product."""
    lhs, rhs = call.inputs
    call.require(lhs.dtype == rhs.dtype, "operands must be of one element type")
    call.require_kind(lhs.dtype, ARITHMETIC)
    if call.attrs["precision"] not in PRECISIONS:
        raise call.error(f"precision is one of {PRECISIONS}")
    return lhs, rhs


def _dot(call: Call) -> Types:
    lhs, rhs = _factors(call)
    for side, kind in ((lhs, "lhs"), (rhs, "rhs")):
        _axes(call, (*call.attrs[f"{kind}_contract"], *call.attrs[f"{kind}_batch"]), len(side.shape))
    for pair in ("contract", "batch"):
        left = [lhs.shape[i] for i in call.attrs[f"lhs_{pair}"]]
        right = [rhs.shape[i] for i in call.attrs[f"rhs_{pair}"]]
        if left != right:
            raise call.error(f"{pair} axes must have equal sizes")
    return (TensorType(F32 if lhs.dtype.is_float else S32, dot_shape(lhs.shape, rhs.shape, call.attrs)),)


def _conv(call: Call) -> Types:
    lhs, rhs = _factors(call)
    result = TensorType(F32 if lhs.dtype.is_float else S32, call.asked_type().shape)
    wrong = conv_problem(call.attrs["contraction"], lhs.shape, rhs.shape, result.shape)
    call.require(not wrong, wrong)
    return (result,)


def _take_rows(call: Call) -> Types:
    x, index = call.inputs
    call.require(index.dtype == S32 and len(index.shape) == 1 and bool(x.shape), "takes [N, C...] and s32[R]")
    return (TensorType(x.dtype, (*index.shape, *x.shape[1:])),)


def _scatter_rows(call: Call) -> Types:
    x, index, updates = call.inputs
    if call.attrs["mode"] not in SCATTER_MODES:
        raise call.error(f"mode is one of {SCATTER_MODES}")
    call.require(index.dtype == S32 and len(index.shape) == 1 and bool(x.shape), "takes [N, C...], s32[R] and [R, C...]")
    call.require(updates == TensorType(x.dtype, (*index.shape, *x.shape[1:])), "updates must be [R, C...] of the operand's type")
    return (x,)


def _starts(call: Call, starts: Types, rank: int) -> None:
    call.require(starts == (TensorType(S32),) * rank, "takes one s32[] start for each axis")


def _dynamic_slice(call: Call) -> Types:
    x, *starts = call.inputs
    sizes = call.attrs["sizes"]
    _starts(call, tuple(starts), len(x.shape))
    call.require(len(sizes) == len(x.shape) and all(0 <= s <= n for s, n in zip(sizes, x.shape, strict=True)), "sizes must fit")
    return (TensorType(x.dtype, tuple(sizes)),)


def _dynamic_update_slice(call: Call) -> Types:
    x, update, *starts = call.inputs
    _starts(call, tuple(starts), len(x.shape))
    fits = len(update.shape) == len(x.shape) and all(u <= n for u, n in zip(update.shape, x.shape, strict=True))
    call.require(fits and update.dtype == x.dtype, "the update must fit into the operand")
    return (x,)


def _sort(call: Call) -> Types:
    call.require(len({t.shape for t in call.inputs}) == 1, "operands must have one shape")
    _axes(call, (call.attrs["axis"],), len(call.inputs[0].shape))
    call.require(1 <= call.attrs["keys"] <= len(call.inputs), "keys counts the leading operands compared")
    call.require(all(t.dtype != PRED for t in call.inputs), "is not defined on pred")
    axis, count, shape = call.attrs["axis"], call.attrs["count"], call.inputs[0].shape
    call.require(1 <= count <= shape[axis], "count is how many of the sorted elements there are along the axis")
    return tuple(TensorType(t.dtype, (*shape[:axis], count, *shape[axis + 1 :])) for t in call.inputs)


def _barrier(call: Call) -> Types:
    """The operands as they are, but only once all of them are there: what is computed from the results is not computed before."""
    return call.inputs


def _types(values: tuple) -> Types:
    return tuple(v.type for v in values)


def _signature(call: Call, region: Graph, inputs: Types, outputs: Types) -> None:
    if _types(region.inputs) != inputs:
        raise call.error(f"region {region.name!r} must take {', '.join(map(str, inputs))}")
    if _types(region.outputs) != outputs:
        raise call.error(f"region {region.name!r} must return {', '.join(map(str, outputs))}")


def _while(call: Call) -> Types:
    condition, body = call.regions
    _signature(call, condition, call.inputs, (TensorType(PRED),))
    _signature(call, body, call.inputs, call.inputs)
    return call.inputs


def _loop(call: Call) -> Types:
    call.require(call.inputs[:1] == (TensorType(S32),), "the first operand is the trip count, s32[]")
    _signature(call, call.regions[0], call.inputs[1:], call.inputs[1:])
    return call.inputs[1:]


def _switch(call: Call) -> Types:
    call.require(call.inputs[:1] == (TensorType(S32),), "the first operand is the branch number, s32[]")
    call.require(bool(call.regions), "takes at least one branch")
    results = _types(call.regions[0].outputs)
    for branch in call.regions:
        _signature(call, branch, call.inputs[1:], results)
    return results


def _fused(call: Call) -> Types:
    (region,) = call.regions
    _signature(call, region, call.inputs, _types(region.outputs))
    return _types(region.outputs)


def _infeed(call: Call) -> Types:
    call.require(bool(call.asked), "its result types must be given")
    return call.asked


def _outfeed(call: Call) -> Types:
    return ()


def _call_host(call: Call) -> Types:
    """As the host's function is declared."""
    function = call.attrs["function"]
    operands, results = (tuple(TensorType(*t) for t in types) for types in (function.operands, function.results))
    call.require(call.inputs == operands, f"takes ({', '.join(map(str, operands))})")
    return results


def _position(call: Call) -> Types:
    return (TensorType(S32),)


def _collective(call: Call) -> Types:
    """What `isa.collectives` says, on dense arrays of as many elements."""
    result = call.asked_type()
    (x,) = call.inputs
    kind, chips, reducer = KINDS.get(call.attrs["kind"]), call.attrs["chips"], call.attrs["reducer"]
    call.require(kind is not None and kind.reduces == (reducer != "none") and reducer in REDUCERS, "a kind with or without a reducer")
    assert kind is not None
    if kind.reduces:
        call.require_kind(x.dtype, BINARY[reducer].on)
    if not (x.dtype == result.dtype and result.elems == kind.received_elems(x.elems, chips)):
        raise call.error(f"cannot become {result}")
    return (result,)


def _await(call: Call) -> Types:
    return call.inputs[:1]


def _shard(call: Call) -> Types:
    (x,) = call.inputs
    sizes = call.attrs["sizes"]
    good = len(sizes) == len(x.shape) and all(n % size == 0 for n, size in zip(x.shape, sizes, strict=True))
    if not good:
        raise call.error(f"every axis must divide by the chips that it is cut over, {sizes}")
    return (TensorType(x.dtype, tuple(n // size for n, size in zip(x.shape, sizes, strict=True))),)


def _unshard(call: Call) -> Types:
    (x,) = call.inputs
    return (TensorType(x.dtype, tuple(n * size for n, size in zip(x.shape, call.attrs["sizes"], strict=True))),)


_ROWS = (
    *(Op(name, 1, (), _unary, elementwise=True) for name in UNARY),
    Op("is_finite", 1, (), _is_finite, elementwise=True),
    *(Op(name, 2, (), _binary, elementwise=True) for name in BINARY),
    Op("compare", 2, ("direction",), _compare, elementwise=True),
    Op("select", 3, (), _select, elementwise=True),
    Op("convert", 1, (), _convert, elementwise=True),
    Op("bitcast", 1, (), _bitcast, elementwise=True),
    Op("full", 0, ("value",), _full),
    Op("constant", 0, ("data",), _constant),
    Op("iota", 0, ("axis",), _iota),
    Op("broadcast", 1, ("axes",), _broadcast),
    Op("window", 1, ("view", "fill"), _window),
    Op("join", None, ("views",), _join),
    Op("reshape", 1, (), _reshape),
    Op("transpose", 1, ("permutation",), _transpose),
    Op("slice", 1, ("start", "limit", "stride"), _slice),
    Op("pad", 2, ("low", "high", "interior"), _pad),
    Op("concatenate", None, ("axis",), _concatenate),
    Op("reverse", 1, ("axes",), _reverse),
    Op("reduce", 1, ("op", "axes"), _reduce),
    Op("cumulative", 1, ("op", "axis", "reverse"), _cumulative),
    Op("dot", 2, ("lhs_contract", "rhs_contract", "lhs_batch", "rhs_batch", "precision"), _dot),
    Op("conv", 2, ("contraction", "precision"), _conv),
    Op("take_rows", 2, ("fill",), _take_rows),
    Op("scatter_rows", 3, ("mode",), _scatter_rows),
    Op("dynamic_slice", None, ("sizes",), _dynamic_slice),
    Op("dynamic_update_slice", None, (), _dynamic_update_slice),
    Op("barrier", None, (), _barrier),
    Op("sort", None, ("axis", "count", "keys"), _sort),
    Op("while", None, (), _while, regions=2),
    Op("loop", None, (), _loop, regions=1),
    Op("switch", None, (), _switch, regions=None),
    Op("fused", None, ("kind",), _fused, regions=1),
    Op("infeed", 0, ("port",), _infeed, effect=True),
    Op("outfeed", 1, ("port",), _outfeed, effect=True),
    Op("call_host", None, ("function",), _call_host, effect=True),
    Op("position", 0, ("axis",), _position),
    *(Op(name, 1, ("kind", "reducer", "axes", "chips", "pairs"), _collective) for name in ("collective", "start")),
    Op("await", 2, (), _await),
    Op("shard", 1, ("cut", "sizes"), _shard),
    Op("unshard", 1, ("cut", "sizes"), _unshard),
)
OPS: dict[str, Op] = {row.name: row for row in _ROWS}
ELEMENTWISE = frozenset(row.name for row in _ROWS if row.elementwise)


def has_effect(op: str, regions: tuple[Graph, ...] = ()) -> bool:
    """Whether the operation, or one nested in its regions, feeds or is fed by the host; such a node is never removed."""
    return OPS[op].effect or any(has_effect(n.op, n.regions) for r in regions for n in r.nodes)
