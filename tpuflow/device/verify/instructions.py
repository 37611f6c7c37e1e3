"""Every instruction by its declaration: fields that hold what their kinds say, operands as its rules have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpuflow.isa import dma
from tpuflow.isa.instruction import FieldKind, Instruction
from tpuflow.isa.program import Kernel
from tpuflow.isa.refusal import Refusal


def check_fields(kernel: Kernel, instruction: Instruction) -> None:
    """Every field holds what its kind says (words from their lists, small numbers, semaphores that exist)."""
    if not instruction.traits:
        raise Refusal(f"instruction {instruction.mnemonic!r} states no traits in its declaration; expected some, to check it by")
    for name, kind, value in instruction.fields():
        if kind.name not in _FIELD_RULES:
            raise Refusal(f"field {name} of {instruction.mnemonic!r} is of kind {kind.name!r}; expected one of {', '.join(_FIELD_RULES)}")
        _FIELD_RULES[kind.name](name, kind, value)
    if isinstance(instruction, dma.Signal | dma.Wait):
        _semaphore(kernel, instruction)


def _semaphore(kernel: Kernel, i: dma.Signal | dma.Wait) -> None:
    if i.semaphore >= len(kernel.semaphores):
        raise Refusal(f"semaphore {i.semaphore} does not exist; the kernel has {len(kernel.semaphores)}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(name: str, kind: FieldKind, value: Any) -> None:
    if not _is_count(value):
        raise Refusal(f"{name} is {value!r}; expected a non-negative integer")


def _axes(name: str, kind: FieldKind, value: Any) -> None:
    if not all(_is_count(v) for v in value):
        raise Refusal(f"{name} are {value!r}; expected non-negative integers")


def _choice(name: str, kind: FieldKind, value: Any) -> None:
    if value not in kind.choices:
        raise Refusal(f"{name} is {value!r}; expected one of {', '.join(kind.choices)}")


def _flag(name: str, kind: FieldKind, value: Any) -> None:
    if not isinstance(value, bool):
        raise Refusal(f"{name} is {value!r}; expected True or False")


def _by_operands(name: str, kind: FieldKind, value: Any) -> None:
    """Tiles and windows are checked as such; pairs, bounds and immediates with the operands that they go with."""


_FIELD_RULES: dict[str, Callable[[str, FieldKind, Any], None]] = {
    "number": _number,
    "axes": _axes,
    "choice": _choice,
    "flag": _flag,
    **dict.fromkeys(("tile", "tiles", "window", "pairs", "bounds", "immediate"), _by_operands),
}


def check_operands(instruction: Instruction) -> None:
    """Every rule that the declaration states."""
    if instruction.rules is None:
        raise Refusal(f"instruction {instruction.mnemonic!r} has no operand rules; expected `rules=` in its declaration")
    for rule in instruction.rules:
        rule.check(instruction)
