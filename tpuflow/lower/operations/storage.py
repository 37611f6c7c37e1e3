"""Storage-only types: fp8, and integers of 4 and 2 bits.

Operations that move elements take them directly. For all others they are widened to the type in which they are computed, and results are
rounded, or truncated, back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tpuflow.dtypes import BF16, S2, S4, S8, U2, U4, U8, DType
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.operations.complex import Number, Type

_OTHER_SIGN: Mapping[tuple[str, DType], DType] = {
    (op, dtype): other
    for ops, signs in ((("shr_logical", "popcnt", "clz"), {S4: U4, S2: U2}), (("shr_arithmetic",), {U4: S4, U2: S2}))
    for op in ops
    for dtype, other in signs.items()
}
"""(operation, type) -> the type in which its operands must be widened: above a number's own bits there are zeros, or copies of its sign."""


def is_stored(types: Sequence[Type]) -> bool:
    """Whether one of the types is storage-only."""
    return any(isinstance(t, TensorType) and t.dtype.wide is not None for t in types)


def in_computed(type: Type) -> Type:
    """The type with the element type in which its elements are computed."""
    return TensorType(type.dtype.computed, type.shape) if isinstance(type, TensorType) else type


def matrix_type(dtype: DType) -> DType:
    """The narrowest type of the matrix unit that holds all values of a type."""
    if dtype.wide is None:
        return dtype
    return BF16 if dtype.wide.is_float else S8 if dtype.wide.kind == "int" else U8


def by_computed(
    b: Builder, op: str, rule: Callable[..., tuple[Number, ...]], operands: Sequence[Number], types: Sequence[Type]
) -> tuple[Number, ...]:
    """The results, of these types, of a rule of the device's operation `op` (another: any other name) on operands in the types that they
    are computed in."""
    results = rule(b, *(_computed(b, op, x) for x in operands))
    if op == "clz" and isinstance(x := operands[0], Value):
        results = tuple(b.sub(r, 32 - x.dtype.bits) for r in results)  # type: ignore[arg-type]
    return tuple(_stored(b, r, t) for r, t in zip(results, types, strict=True))


def _computed(b: Builder, op: str, x: Number) -> Number:
    if not isinstance(x, Value) or x.dtype.wide is None:
        return x
    own = b.convert(x, _OTHER_SIGN.get((op, x.dtype), x.dtype))
    return b.convert(own, own.dtype.computed)


def _stored(b: Builder, x: Number, type: Type) -> Number:
    """A result converted to its declared type, if that is storage-only."""
    return b.convert(x, type.dtype) if isinstance(x, Value) and isinstance(type, TensorType) and type.dtype.wide is not None else x
