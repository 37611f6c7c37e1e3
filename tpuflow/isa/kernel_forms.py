"""The forms of a Program's kernels: equal for those that differ only in names, source lines and which buffers they use.

The layers of a network are alike, so most kernels share a form with others, and what follows from it is found out once: by the verifier,
the timing, the memory planner, the fast engine and the file. Each of them adds to the form's number what of the buffers matters to it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tpuflow.dtypes import exactly
from tpuflow.errors import ProgramError
from tpuflow.isa.instruction import PLAIN_KINDS, Instruction, Window

if TYPE_CHECKING:
    from tpuflow.isa.program import Kernel

WindowForm = Callable[[Window], Hashable]


@dataclass(frozen=True, slots=True)
class KernelForm:
    """A kernel's form: a `number`, which kernels of one form have in common, and the kernel's `buffers` in the order of their first use."""

    number: int
    buffers: tuple[int, ...]

    def with_marks(self, mark: Callable[[int], Hashable]) -> tuple[int, tuple[Hashable, ...]]:
        """The number with what `mark` says of each buffer, as a key."""
        return self.number, tuple(map(mark, self.buffers))


def forms_of(kernels: Iterable[Kernel]) -> tuple[KernelForm, ...]:
    """The forms of kernels, numbered from 0 in order of first appearance.

    Raises:
      ProgramError: an instruction states no traits, or has a field of an unknown kind.
    """
    forms = Forms()
    return tuple([forms.of(kernel) for kernel in kernels])


@dataclass(slots=True)
class Forms:
    """Numbers of keys. Objects that kernels share, as those of equal layers do, are keyed once and recognized by their `id`, so
    that they must live as long."""

    kernels: dict[Hashable, int] = field(default_factory=dict)
    parts: dict[Hashable, int] = field(default_factory=dict)
    shared: dict[Hashable, int] = field(default_factory=dict)

    def copy(self) -> Forms:
        """Others of their own, to go on with."""
        return Forms(self.kernels.copy(), self.parts.copy(), self.shared.copy())

    def of(self, kernel: Kernel) -> KernelForm:
        """A kernel's form.

        Raises:
          ProgramError: as `forms_of`.
        """
        buffers: dict[int, int] = {}

        def window_form(window: Window) -> Hashable:
            return buffers.setdefault(window.buffer, len(buffers)), self._without_buffer(window)

        sections = tuple([tuple([self._instruction(i, window_form) for i in section]) for _, section in kernel.sections])
        key = kernel.grid, kernel.semaphores, sections
        return KernelForm(self.kernels.setdefault(key, len(self.kernels)), tuple(buffers))

    def _instruction(self, instruction: Instruction, window_form: WindowForm) -> int:
        if instruction.windowed:
            return self._number(_instruction_form(instruction, window_form))
        known = self.shared.get(id(instruction))
        if known is None:
            known = self.shared[id(instruction)] = self._number(_instruction_form(instruction, window_form))
        return known

    def _without_buffer(self, window: Window) -> int:
        """The number of a window without its buffer: kernels on other buffers share it."""
        fill = exactly(window.fill)
        place = id(window.tile), id(window.axes), fill
        known = self.shared.get(place)
        if known is None:
            known = self.shared[place] = self._number((window.tile, window.axes, fill))
        return known

    def _number(self, key: Hashable) -> int:
        return self.parts.setdefault(key, len(self.parts))


def _instruction_form(instruction: Instruction, window_form: WindowForm) -> Hashable:
    plain, immediates, windows = _fields_of(type(instruction))
    numbers = [exactly(getattr(instruction, name)) for name in immediates]
    return instruction.opcode, plain(instruction), *numbers, *[window_form(getattr(instruction, name)) for name in windows]


@functools.cache
def _fields_of(cls: type[Instruction]) -> tuple[Callable[[Instruction], Hashable], Sequence[str], Sequence[str]]:
    """(what gets the fields that are their own key, the names of immediates, those of windows).

    Raises:
      ProgramError: as `forms_of`.
    """
    cls.has("transfers")  # or anything else: one that states nothing may mean anything
    unknown = next(((name, kind.name) for name, kind in cls.kinds.items() if kind.name not in KINDS), None)
    if unknown is not None:
        raise ProgramError(f"instruction {cls.mnemonic!r} has a field {unknown[0]} of kind {unknown[1]!r}, which no check knows.")
    plain, immediates, windows = ([name for name, kind in cls.kinds.items() if kind.name in some] for some in _KEYED)
    return operator.attrgetter(*plain) if plain else lambda _: (), immediates, windows


_KEYED = (frozenset(("tile", "tiles", *PLAIN_KINDS)), frozenset(("immediate",)), frozenset(("window",)))
"""Kinds of fields that are their own key, that are told exactly, and whose buffers are numbered."""
KINDS = frozenset().union(*_KEYED)
"""The kinds of fields that forms know."""
