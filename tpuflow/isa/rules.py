"""Operand rules, as data of a declaration: what an instruction's fields must be to each other, each with its sentence in docs/ISA.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tpuflow.dtypes import DType
from tpuflow.isa.instruction import Instruction, Tile, TileAxis
from tpuflow.isa.numpy_arithmetic import is_defined, undefined
from tpuflow.isa.refusal import Refusal

NUMBER = ("float", "int", "uint")
"""Kinds of element types that are numbers."""
ONE = TileAxis(1)


@dataclass(frozen=True, slots=True)
class Rule:
    """`sentence` says what must hold; `check` raises a `Refusal` where it does not, with what was found and expected."""

    sentence: str
    check: Callable[[Any], None]


def rule(sentence: str) -> Callable[[Callable[[Any], None]], Rule]:
    """The decorated check as a rule."""
    return lambda check: Rule(sentence, check)


# --- spaces


@rule("all operands lie in vmem, or all in smem (registers)")
def on_lanes(i: Instruction) -> None:
    """Vector and scalar instructions take their operands from one memory."""
    spaces = {t.space for _, t in tiles_of(i)}
    if spaces != {"vmem"} and spaces != {"smem"}:
        raise Refusal(f"operands lie in {', '.join(sorted(spaces))}; expected all in vmem, or all in smem (registers)")


def lies_in(**spaces: str) -> Rule:
    """Named operands lie in the given spaces (alternatives separated by a bar)."""

    def check(i: Any) -> None:
        for name, allowed in spaces.items():
            if getattr(i, name).space not in allowed.split("|"):
                raise Refusal(f"{name} lies in {getattr(i, name).space}; expected {allowed.replace('|', ' or ')}")

    return Rule(", ".join(f"`{name}` lies in {allowed.replace('|', ' or ')}" for name, allowed in spaces.items()), check)


# --- axes


def _equal(names: tuple[str, ...], of: Callable[[Tile], Any], differs: Callable[[Any, Any], str], sentence: str) -> Rule:
    """Named operands are alike in what `of` gives of each; `differs` says of one and the first that they are not."""

    def check(i: Any) -> None:
        first, *others = (of(getattr(i, name)) for name in names)
        for name, found in zip(names[1:], others, strict=True):
            if found != first:
                raise Refusal(f"{name} {differs(found, first)} of {names[0]}")

    return Rule(f"{_listed(names)} {sentence}", check)


def same_axes(*names: str) -> Rule:
    """Named operands have the axes of the first (same size, same blocking)."""
    differs = lambda found, first: f"has axes {axes_text(found)}; expected {axes_text(first)}, those"  # noqa: E731
    return _equal(names, lambda tile: tile.axes, differs, "have the same axes")


def axis_of(name: str) -> Rule:
    """`axis` is an axis of a named operand."""

    def check(i: Any) -> None:
        rank = len(getattr(i, name).axes)
        if i.axis >= rank:
            raise Refusal(f"axis is {i.axis}; {name} has rank {rank}")

    return Rule(f"`axis` is an axis of `{name}`", check)


def require_axes(name: str, tile: Tile, expected: tuple[TileAxis, ...]) -> None:
    """A tile has just these axes."""
    if tile.axes != expected:
        raise Refusal(f"{name} has axes {axes_text(tile.axes)}; expected {axes_text(expected)}")


# --- element types


def same_dtype(*names: str) -> Rule:
    """Named operands have the type of the first."""
    return _equal(names, lambda tile: tile.dtype, lambda found, first: f"is {found}; expected {first}, the type", "are of one type")


def is_of(name: str, *allowed: DType) -> Rule:
    """A named operand has one of the given types."""

    def check(i: Any) -> None:
        if getattr(i, name).dtype not in allowed:
            raise Refusal(f"{name} is {getattr(i, name).dtype}; expected {' or '.join(map(str, allowed))}")

    return Rule(f"`{name}` is {' or '.join(map(str, allowed))}", check)


def is_of_kind(name: str, *allowed: str) -> Rule:
    """A named operand's type is of one of the given kinds."""

    def check(i: Any) -> None:
        dtype = getattr(i, name).dtype
        if dtype.kind not in allowed:
            raise Refusal(f"{name} is {dtype}; expected a type of kind {' or '.join(sorted(allowed))}")

    return Rule(f"`{name}` is of kind {' or '.join(sorted(allowed))}", check)


def is_computed(name: str) -> Rule:
    """A named operand's type is one to compute with."""

    def check(i: Any) -> None:
        require_computed(name, getattr(i, name).dtype)

    return Rule(f"`{name}` is not of kind storage", check)


def require_computed(name: str, dtype: DType) -> None:
    """Not a type that is only kept, moved and converted."""
    if dtype.wide is not None:
        raise Refusal(f"{name} is {dtype}, which is only stored; expected it converted to {dtype.wide} before")


def defined_on(name: str, op: str = "op") -> Rule:
    """The arithmetic has the sub-operation named in field `op` for the type of a named operand."""

    def check(i: Any) -> None:
        require_defined(getattr(i, op), getattr(i, name).dtype)

    return Rule(f"`{op}` is defined on the type of `{name}`", check)


def require_defined(op: str, dtype: DType) -> None:
    """The arithmetic has the operation on a type."""
    if not is_defined(op, dtype):
        raise Refusal(str(undefined(op, dtype)))


def check_immediate(value: object, dtype: DType) -> None:
    """A Python number that `dtype` can hold (floats are rounded, so any will do)."""
    if dtype.kind == "pred":
        ok = value in (False, True)
    elif dtype.computed.is_float:
        ok = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        bits = dtype.bits
        low, high = (0, 2**bits) if dtype.computed.kind == "uint" else (-(2 ** (bits - 1)), 2 ** (bits - 1))
        ok = isinstance(value, int) and not isinstance(value, bool) and low <= value < high
    if not ok:
        raise Refusal(f"the immediate {value!r} is not a value of {dtype}")


# --- places


def tiles_of(i: Instruction) -> Iterator[tuple[str, Tile]]:
    """Every tile that a field holds, by the field's name; not those of windows."""
    for name, kind, value in i.fields():
        if kind.name == "tile":
            yield name, value
        elif kind.name == "tiles":
            yield from ((f"{name}[{n}]", t) for n, t in enumerate(value))


def overlap(x: Tile, y: Tile) -> bool:
    """Whether two tiles start at one place (partial overlaps are found by the ordering walk, cell by cell)."""
    return x.space == y.space and x.address == y.address


def axes_text(axes: tuple[TileAxis, ...]) -> str:
    """[8 of 20 by grid 0, 128]."""
    return f"[{', '.join(f'{a.size} of {a.extent} by grid {a.grid}' if a.grid >= 0 else str(a.size) for a in axes)}]"


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(filter(None, (", ".join(f"`{n}`" for n in names[:-1]), f"`{names[-1]}`")))
