"""Kernels as keys: equal for those that a check, or a timing, cannot tell apart. Every field counts but those that are named here."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields
from typing import Any

from tpuflow.errors import ProgramError
from tpuflow.isa.instruction import PLAIN_KINDS, Instruction, Window
from tpuflow.isa.program import SECTIONS, Kernel

WindowForm = Callable[[Window], Hashable]
_SAID_ONLY = ("name", "scope", "sources")
_KERNEL_FIELDS = tuple(f.name for f in fields(Kernel) if f.name not in (*SECTIONS, *_SAID_ONLY))


def kernel_form(kernel: Kernel, window_form: WindowForm) -> Hashable:
    """All of a kernel but its name, scope and source lines, each window as `window_form` writes it.

    Raises:
      ProgramError: an instruction that states no traits, or a field of a kind that nothing is known of.
    """
    sections = tuple(tuple(_instruction_form(i, window_form) for i in section) for _, section in kernel.sections)
    return (*(getattr(kernel, name) for name in _KERNEL_FIELDS), sections)


def exactly(number: Any) -> Hashable:
    """A number as a key: True, 1 and 1.0 differ, and so do zeros of either sign."""
    return type(number), repr(number)


def _instruction_form(instruction: Instruction, window_form: WindowForm) -> Hashable:
    instruction.has("transfers")  # or anything else: one that states nothing may mean anything
    values = []
    for name, kind, value in instruction.fields():
        if kind.name not in _FORMS:
            raise ProgramError(f"instruction {instruction.mnemonic!r} has a field {name} of kind {kind.name!r}, which no check knows.")
        values.append(_FORMS[kind.name](value, window_form))
    return instruction.opcode, *values


def _itself(value: Any, window_form: WindowForm) -> Hashable:
    return value


_FORMS: dict[str, Callable[[Any, WindowForm], Hashable]] = {
    **dict.fromkeys(("tile", "tiles", *PLAIN_KINDS), _itself),
    "immediate": lambda value, window_form: exactly(value),
    "window": lambda window, window_form: window_form(window),
}
