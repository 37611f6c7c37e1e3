"""The table of operations on arrays, with the typing rule of each: it checks operands and attributes and infers the result types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tpuflow.dtypes import F32, PRED, S32, U32
from tpuflow.dtypes import from_numpy as dtype_of
from tpuflow.isa.elementwise import BINARY, COMPARE, CUMULATIVE, REDUCE, UNARY
from tpuflow.lower.graph.graph import TensorType
from tpuflow.lower.graph.op import Call, Op, Types
from tpuflow.lower.graph.products import PRECISIONS, conv_problem
from tpuflow.lower.graph.view import problem

SCATTER_MODES = ("set", "add", "mul", "min", "max")
ARITHMETIC = ("float", "int", "uint")
FLOAT = ("float",)


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


def _random(call: Call) -> Types:
    result = call.asked_type()
    call.require(call.inputs == (TensorType(U32, (4,)),) and result.dtype == U32, "makes u32 of a state, u32[4]")
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
    """The operand types of a product, checked."""
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


ARRAY_OPS = (
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
    Op("random", 1, (), _random),
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
    Op("sort", None, ("axis", "count", "keys"), _sort),
)
