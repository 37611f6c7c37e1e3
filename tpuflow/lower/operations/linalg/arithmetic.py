"""Arithmetic on real or complex arrays, so that a factorisation is written once for both.

On real arrays every function emits the builder's own node, and a conjugate emits nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.operations import complex as numbers
from tpuflow.lower.operations.complex import Complex, Number, as_complex, bilinear

N = TypeVar("N", bound=Number)
"""The kind of an operation's result, which is that of its first operand: complex if any operand is."""


def each(operation: Callable[..., Value], x: N, *others: Number) -> N:
    """Apply an operation that treats both planes of complex numbers alike, such as a move, a sum or a real factor.

    With a complex x it runs on the real planes and on the imaginary ones; a real operand among `others` takes part in both runs.
    """
    operands = (x, *others)
    if not isinstance(x, Complex):
        return cast(N, operation(*operands))
    both = [(y.real, y.imag) if isinstance(y, Complex) else (y, y) for y in operands]
    return cast(N, Complex(*(operation(*planes) for planes in zip(*both, strict=True))))


def real(x: Number) -> Value:
    """The real part."""
    return x.real if isinstance(x, Complex) else x


def like(b: Builder, x: Number, other: Number) -> Number:
    """x, converted to complex if `other` is complex."""
    return as_complex(b, x) if isinstance(other, Complex) else x


def conj(b: Builder, x: N) -> N:
    """x with its imaginary part negated."""
    return cast(N, numbers.conj(b, x)) if isinstance(x, Complex) else x


def neg(b: Builder, x: N) -> N:
    """-x."""
    return each(b.neg, x)


def add(b: Builder, x: N, y: N) -> N:
    """x + y."""
    return each(b.add, x, y)


def sub(b: Builder, x: N, y: N) -> N:
    """x - y."""
    return each(b.sub, x, y)


def mul(b: Builder, x: N, y: Number) -> N:
    """x y."""
    return cast(N, numbers.mul(b, x, y)) if isinstance(x, Complex) and isinstance(y, Complex) else each(b.mul, x, y)


def div(b: Builder, x: N, y: Number) -> N:
    """x / y."""
    return cast(N, numbers.div(b, x, y)) if isinstance(x, Complex) and isinstance(y, Complex) else each(b.div, x, y)


def select(b: Builder, where: Value, x: Number, y: Number | float) -> Number:
    """x where `where` holds, else y."""
    if not isinstance(x, Complex) and not isinstance(y, Complex):
        return b.select(where, x, y)
    (first, second), (third, fourth) = (_parts(b, x), _parts(b, y))
    return Complex(b.select(where, first, third), b.select(where, second, fourth))


def _parts(b: Builder, x: Number | float) -> tuple[Value | float, Value | float]:
    if isinstance(x, Complex | Value):
        whole = as_complex(b, x)
        return whole.real, whole.imag
    return x, 0


def squared(b: Builder, x: Number) -> Value:
    """|x|^2."""
    if isinstance(x, Complex):
        return b.add(b.mul(x.real, x.real), b.mul(x.imag, x.imag))
    return b.mul(x, x)


def rough_size(b: Builder, x: Number) -> Value:
    """|x|, or |a| + |c| of a complex a + c i, by which LAPACK and so JAX choose pivots."""
    return b.add(b.abs(x.real), b.abs(x.imag)) if isinstance(x, Complex) else b.abs(x)


def nonzero(b: Builder, x: Number) -> Value:
    """x is not 0."""
    return b.or_(b.ne(x.real, 0), b.ne(x.imag, 0)) if isinstance(x, Complex) else b.ne(x, 0)


def concatenate(b: Builder, parts: Sequence[Number], axis: int) -> Number:
    """The parts concatenated along an axis, as complex numbers if any part is complex."""
    most = next((x for x in parts if isinstance(x, Complex)), parts[0])
    return each(lambda *arrays: b.concatenate(arrays, axis), *(like(b, x, most) for x in parts))


def product(b: Builder, x: Number, y: Number) -> Number:
    """[B, M, K] @ [B, K, N] -> [B, M, N], at the precision `highest` (all bits of f32 operands)."""

    def once(x: Value, y: Value) -> Value:
        return b.dot(x, y, (2,), (1,), (0,), (0,), "highest")

    return once(x, y) if isinstance(x, Value) and isinstance(y, Value) else bilinear(b, once, x, y)
