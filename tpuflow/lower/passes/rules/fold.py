"""Rules that compute at compile time what is certain: elementwise work on splats, choices already made, integer identities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tpuflow.dtypes import PRED
from tpuflow.isa.numpy_arithmetic import NumpyArithmetic
from tpuflow.isa.vector import BINARY, UNARY
from tpuflow.lower.graph.graph import Node, TensorType, Value
from tpuflow.lower.graph.ops import ELEMENTWISE
from tpuflow.lower.passes.rewriter import Rewriter
from tpuflow.lower.passes.rules.table import rewrites, rewrites_all

_DEVICE = NumpyArithmetic()


def _meaning(node: Node) -> Callable[..., Any]:
    """The device's own function for an elementwise node, on carriers of shape ()."""
    op, types, result = node.op, [x.dtype for x in node.inputs], node.result.dtype
    table: Mapping[str, Callable[..., Any]] = {
        "is_finite": lambda a: _DEVICE.is_finite(a, types[0]),
        "compare": lambda a, b: _DEVICE.compare(node.attrs["direction"], a, b, types[0]),
        "select": lambda p, a, b: _DEVICE.select(p, a, b, result),
        "convert": lambda a: _DEVICE.convert(a, types[0], result),
        "bitcast": lambda a: _DEVICE.bitcast(a, types[0], result),
    }
    if op in UNARY:
        return lambda a: _DEVICE.unary(op, a, types[0])
    if op in BINARY:
        return lambda a, b: _DEVICE.binary(op, a, b, types[0])
    return table[op]


@rewrites_all(ELEMENTWISE)
def _splats(rw: Rewriter, node: Node) -> Value | None:
    """Work on splats gives a splat: one element, computed as the device computes it, rounding included."""
    known = [rw.splat(x) for x in node.inputs]
    if None in known:
        return None
    operands = [_DEVICE.full((), k, x.dtype) for k, x in zip(known, node.inputs, strict=True)]  # type: ignore[arg-type]
    value = np.asarray(_DEVICE.store(_meaning(node)(*operands), node.result.dtype)).item()
    return rw.full(node.result.dtype, node.result.shape, value)


@rewrites_all(ELEMENTWISE)
def _uniform(rw: Rewriter, node: Node) -> Value | None:
    """Work on one number everywhere is 0-d work, and its result everywhere."""
    made = [rw.maker(x) for x in node.inputs]
    if not node.result.shape or None in made or not any(m.op == "broadcast" for m in made if m):
        return None
    operands = [_number(rw, x, m) for x, m in zip(node.inputs, made, strict=True) if m]
    if None in operands:
        return None
    result = node.result.type
    number = rw.emit(node.op, operands, TensorType(result.dtype), **node.attrs)  # type: ignore[arg-type]
    return rw.emit("broadcast", (number,), result, axes=())


def _number(rw: Rewriter, x: Value, made: Node) -> Value | None:
    """The 0-d value that fills x, if one does."""
    if made.op == "full":
        return rw.full(x.dtype, (), made.attrs["value"])
    return made.inputs[0] if made.op == "broadcast" and not made.inputs[0].shape else None


@rewrites("select")
def _select(rw: Rewriter, node: Node) -> Value | None:
    """Known condition, or the same on both sides: no choice."""
    pred, on_true, on_false = node.inputs
    if on_true is on_false:
        return on_true
    known = rw.splat(pred)
    return None if known is None else (on_true if known else on_false)


# Integer and pred operations only: on floats even x + 0 changes bits (signed zeros, subnormals, NaNs).
_NEUTRAL_RIGHT = {"add": 0, "sub": 0, "mul": 1, "div": 1, "or": 0, "xor": 0, "shl": 0, "shr_logical": 0, "shr_arithmetic": 0}
_COMMUTES = frozenset(("add", "mul", "or", "xor", "and"))


@rewrites(*_NEUTRAL_RIGHT, "and")
def _neutral(rw: Rewriter, node: Node) -> Value | None:
    """x + 0, x * 1, x | 0, x & all ones, ... of integers and preds are x."""
    x, y = node.inputs
    if x.dtype.is_float:
        return None
    ones = True if x.dtype == PRED else -1 if x.dtype.kind == "int" else (1 << 8 * x.dtype.bytes) - 1
    neutral = ones if node.op == "and" else _NEUTRAL_RIGHT[node.op]
    if rw.splat(y) is not None and rw.splat(y) == neutral:
        return x
    if node.op in _COMMUTES and rw.splat(x) is not None and rw.splat(x) == neutral:
        return y
    return None
