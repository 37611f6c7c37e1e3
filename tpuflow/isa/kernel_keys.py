"""Kernels as keys: equal for those that a check, or a timing, cannot tell apart. Every field counts but those that are named here."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
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


@dataclass(slots=True)
class KernelForms:
    """Kernels of one Program as short keys, equal where they differ in nothing but names, source lines and which buffers they are on.

    What kernels share, as those of layers written out alike do, is looked at once and known again by its identity: a table is for one
    Program that is there as long as the table.
    """

    numbers: dict[Hashable, int] = field(default_factory=dict)
    shared: dict[Hashable, int] = field(default_factory=dict)

    def of(self, kernel: Kernel, mark: Callable[[int], Hashable]) -> tuple[Hashable, tuple[int, ...]]:
        """The form of a kernel, and its buffers in the order in which the form numbers them; `mark` gives what counts of a buffer.

        Raises:
          ProgramError: as `kernel_form`.
        """
        buffers: dict[int, int] = {}

        def window_form(window: Window) -> Hashable:
            return buffers.setdefault(window.buffer, len(buffers)), mark(window.buffer), self._apart(window)

        sections = tuple([tuple([self._instruction(i, window_form) for i in section]) for _, section in kernel.sections])
        return (*(getattr(kernel, name) for name in _KERNEL_FIELDS), sections), tuple(buffers)

    def _instruction(self, instruction: Instruction, window_form: WindowForm) -> int:
        if instruction.windowed:
            return self._number(_instruction_form(instruction, window_form))
        known = self.shared.get(id(instruction))
        if known is None:
            known = self.shared[id(instruction)] = self._number(_instruction_form(instruction, window_form))
        return known

    def _apart(self, window: Window) -> int:
        """A window without its buffer: kernels on other buffers share the rest."""
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
