"""Rules for reductions and scatters that combine nothing, or only once."""

from __future__ import annotations

from tpuflow.lower.graph.graph import Node, TensorType, Value
from tpuflow.lower.passes.rewriter import Rewriter
from tpuflow.lower.passes.rules.table import rewrites

MAX_PARTS = 16
MAX_SCALARS = 1024  # they are combined in registers


@rewrites("reduce")
def _reduce(rw: Rewriter, node: Node) -> Value | None:
    """A reduction over axes of size 1 only is a reshape. (Beside longer ones they stay: a reshape would separate it from its operand.)"""
    if any(node.inputs[0].shape[axis] != 1 for axis in node.attrs["axes"]):
        return None
    return rw.reshape(node.inputs[0], node.result.shape)


@rewrites("reduce")
def _reduce_of_stack(rw: Rewriter, node: Node) -> Value | None:
    """A reduction of a concatenate of a few slices of size 1, if its order does not matter, is a tree of elementwise operations."""
    parts, op, result = rw.maker(node.inputs[0], "concatenate"), node.attrs["op"], node.result.type
    if parts is None or node.attrs["axes"] != (parts.attrs["axis"],) or len(parts.inputs) > (MAX_PARTS if result.shape else MAX_SCALARS):
        return None
    ordered = result.dtype.is_float and op in ("add", "mul")
    if ordered or any(part.shape[parts.attrs["axis"]] != 1 for part in parts.inputs):
        return None
    values = [rw.reshape(part, result.shape) for part in parts.inputs]
    while len(values) > 1:
        pairs = [values[i : i + 2] for i in range(0, len(values), 2)]
        values = [rw.emit(op, pair, result) if len(pair) == 2 else pair[0] for pair in pairs]
    return values[0]


@rewrites("scatter_rows")
def _scatter_one_row(rw: Rewriter, node: Node) -> Value | None:
    """A scatter of one update into the only row is an elementwise operation."""
    x, index, updates = node.inputs
    if x.shape[0] != 1 or index.shape != (1,) or rw.splat(index) != 0:
        return None
    mode = node.attrs["mode"]
    return updates if mode == "set" else rw.emit(mode, (x, updates), TensorType(x.dtype, x.shape))
