"""Rules for conversions: to the same type, round trips, and operations that can as well be done in the narrower type."""

from __future__ import annotations

from tpuflow.dtypes import BF16, F16, F32, S2, S4, S8, S16, S32, U2, U4, U8, U16, U32, DType
from tpuflow.isa.elementwise import OPERATIONS
from tpuflow.isa.numpy_rounding import splat
from tpuflow.lower.graph.graph import Node, TensorType, Value
from tpuflow.lower.passes.rewriter import Rewriter
from tpuflow.lower.passes.rules.table import rewrites

HOLDS = {F16: (F32,), BF16: (F32,), S8: (S16, S32), S16: (S32,), U8: (U16, U32, S16, S32), U16: (U32, S32)} | {
    S2: (S4, S8, S16, S32), S4: (S8, S16, S32), U2: (U4, U8, U16, U32, S4, S8, S16, S32), U4: (U8, U16, U32, S8, S16, S32),
}  # fmt: skip
"""type -> types that represent all of its values."""

SMALLEST_NORMAL = 2.0**-126  # of f32 and bf16

ROUNDED = frozenset(name for name, row in OPERATIONS.items() if row.rounds) | {"convert"}
"""Operations whose float results have one kind of NaN and no subnormals where the type's arithmetic flushes them."""


@rewrites("convert", "bitcast")
def _same_type(rw: Rewriter, node: Node) -> Value | None:
    """A bitcast or convert to the same type is its operand; but a convert of floats stays, because it flushes subnormals."""
    (x,) = node.inputs
    return x if x.dtype == node.result.dtype and (node.op == "bitcast" or not x.dtype.is_float) else None


@rewrites("convert")
def _there_and_back(rw: Rewriter, node: Node) -> Value | None:
    """narrow(widen(x)) = x for integers, and for floats that an arithmetic operation has just rounded."""
    wide = rw.maker(node.inputs[0], "convert")
    if wide is None:
        return None
    x = wide.inputs[0]
    if x.dtype != node.result.dtype or wide.result.dtype not in HOLDS.get(x.dtype, ()):
        return None
    return x if not x.dtype.is_float or _rounded(rw, x) else None


@rewrites("max", "min", "select", "compare")
def _chosen_before_converts(rw: Rewriter, node: Node) -> Value | None:
    """op(widen(x), widen(y)) = widen(op(x, y)) for max, min, select and compare of 16-bit floats, so that wide copies need not be stored.

    These operations return or compare their operands, and treat NaNs and subnormals as the conversion does.
    """
    choice, operands = (node.inputs[:1], node.inputs[1:]) if node.op == "select" else ((), node.inputs)
    inner = [rw.maker(x, "convert") for x in operands]
    narrow = {made.inputs[0].dtype for made in inner if made is not None}
    if len(narrow) != 1:
        return None
    (dtype,) = narrow
    if not dtype.is_float or operands[0].dtype not in HOLDS.get(dtype, ()):
        return None
    found = (made.inputs[0] if made is not None else _narrow_splat(rw, x, dtype) for made, x in zip(inner, operands, strict=True))
    sides = [side for side in found if side is not None]
    if len(sides) < len(operands):
        return None
    result = node.result.type
    chosen = rw.emit(node.op, (*choice, *sides), result if node.op == "compare" else TensorType(dtype, result.shape), **node.attrs)
    return chosen if node.op == "compare" else rw.emit("convert", (chosen,), result)


def _narrow_splat(rw: Rewriter, x: Value, dtype: DType) -> Value | None:
    """A splat in a narrower type, if that holds its number."""
    number = rw.splat(x)
    if number is None or splat(number, dtype).astype(x.dtype.numpy) != splat(number, x.dtype):
        return None
    return rw.full(dtype, x.shape, number)


def _rounded(rw: Rewriter, x: Value) -> bool:
    """Whether x only holds values that an arithmetic operation can write (canonical NaNs, no subnormals)."""
    made = rw.maker(x)
    if made is None:
        return False
    if made.op == "select":
        return all(_rounded(rw, side) for side in made.inputs[1:])
    return made.op in ROUNDED or (made.op == "full" and (made.attrs["value"] == 0 or abs(made.attrs["value"]) >= SMALLEST_NORMAL))
