"""What a kernel's time depends on, as a key: all of it but names, source lines, and which buffers its windows are on."""

from __future__ import annotations

from collections.abc import Hashable

from tpuflow.isa.instruction import Instruction
from tpuflow.isa.program import Kernel


def form_of(kernel: Kernel) -> Hashable:
    """Equal for kernels that take the same time on any chip; buffers are numbered in order of appearance."""
    numbers: dict[int, int] = {}
    sections = tuple([tuple([_form(i, numbers) for i in s]) for s in (kernel.prologue, kernel.body, kernel.epilogue)])
    return kernel.grid, kernel.semaphores, sections


def _form(instruction: Instruction, numbers: dict[int, int]) -> Hashable:
    if not instruction.windowed:
        return instruction
    windows = {name: getattr(instruction, name) for name, _ in instruction.windowed}
    forms = [(numbers.setdefault(w.buffer, len(numbers)), w.tile, w.axes, w.fill) for w in windows.values()]
    return instruction.opcode, *forms, *(getattr(instruction, name) for name in instruction.kinds if name not in windows)
