"""Constant folding: elementwise operations on splats, selects with known conditions, integer identities."""

from __future__ import annotations

from tpuflow.dtypes import PRED
from tpuflow.lower.graph.elementwise import fold_splats
from tpuflow.lower.graph.graph import Node, TensorType, Value
from tpuflow.lower.graph.ops import ELEMENTWISE
from tpuflow.lower.passes.rewriter import Rewriter
from tpuflow.lower.passes.rules.table import rewrites, rewrites_all


@rewrites_all(ELEMENTWISE)
def _splats(rw: Rewriter, node: Node) -> Value | None:
    """An elementwise operation on splats is a splat, computed in the device's arithmetic, rounding included."""
    known = [rw.splat(x) for x in node.inputs]
    if None in known:
        return None
    value = fold_splats(node.op, node.attrs, known, [x.dtype for x in node.inputs], node.result.dtype)  # type: ignore[arg-type]
    return None if value is None else rw.full(node.result.dtype, node.result.shape, value)


@rewrites_all(ELEMENTWISE)
def _uniform(rw: Rewriter, node: Node) -> Value | None:
    """An elementwise operation on broadcast scalars is a 0-d operation and a broadcast of its result."""
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
    """A select with a constant condition, or with equal cases, is one of its cases."""
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
