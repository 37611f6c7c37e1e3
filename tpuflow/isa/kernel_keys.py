"""Kernels as cache keys, for the verifier's verdicts and the timing's results: equal if kernels differ in debug information alone.

Every field is part of the key unless it is named in `_DEBUG_FIELDS`. Each user decides what of a window's buffer is part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from typing import Any

from tpuflow.errors import ProgramError
from tpuflow.isa.instruction import PLAIN_KINDS, Instruction, Window
from tpuflow.isa.program import SECTIONS, Kernel

WindowForm = Callable[[Window], Hashable]
_DEBUG_FIELDS = ("name", "scope", "sources")
_KERNEL_FIELDS = tuple(f.name for f in fields(Kernel) if f.name not in (*SECTIONS, *_DEBUG_FIELDS))


def kernel_form(kernel: Kernel, window_form: WindowForm) -> Hashable:
    """The key of a kernel: all but its name, scope and source lines, with each window replaced by `window_form(window)`.

    Raises:
      ProgramError: an instruction states no traits, or has a field of an unknown kind.
    """
    sections = tuple(tuple(_instruction_form(i, window_form) for i in section) for _, section in kernel.sections)
    return (*(getattr(kernel, name) for name in _KERNEL_FIELDS), sections)


@dataclass(slots=True)
class KernelForms:
    """Short keys of the kernels of one Program, equal if kernels differ only in names, source lines and which buffers they use.

    Objects that kernels share, as the kernels of equal layers do, are keyed once and recognized by their `id`. So the Program must live as
    long as this table.
    """

    numbers: dict[Hashable, int] = field(default_factory=dict)
    shared: dict[Hashable, int] = field(default_factory=dict)

    def of(self, kernel: Kernel, mark: Callable[[int], Hashable]) -> tuple[Hashable, tuple[int, ...]]:
        """(the key of a kernel, its buffers in the order in which the key numbers them); mark: what of a buffer is part of the key.

        Raises:
          ProgramError: as `kernel_form`.
        """
        buffers: dict[int, int] = {}

        def window_form(window: Window) -> Hashable:
            return buffers.setdefault(window.buffer, len(buffers)), mark(window.buffer), self._without_buffer(window)

        sections = tuple([tuple([self._instruction(i, window_form) for i in section]) for _, section in kernel.sections])
        return (*(getattr(kernel, name) for name in _KERNEL_FIELDS), sections), tuple(buffers)

    def _instruction(self, instruction: Instruction, window_form: WindowForm) -> int:
        if instruction.windowed:
            return self._number(_instruction_form(instruction, window_form))
        known = self.shared.get(id(instruction))
        if known is None:
            known = self.shared[id(instruction)] = self._number(_instruction_form(instruction, window_form))
        return known

    def _without_buffer(self, window: Window) -> int:
        """The key of a window without its buffer: kernels on other buffers share it."""
        parts = id(window.tile), id(window.axes), window.fill
        known = self.shared.get(parts)
        if known is None:
            known = self.shared[parts] = self._number((window.tile, window.axes, window.fill))
        return known

    def _number(self, key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))


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
