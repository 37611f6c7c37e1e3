"""What a kernel's verdict depends on: its text with buffers numbered in order of use. Equal structures are checked once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from tpuflow.isa.instruction import Window
from tpuflow.isa.kernel_keys import exactly, kernel_form
from tpuflow.isa.program import Buffer, Kernel


def structure(kernel: Kernel, buffers: Sequence[Buffer]) -> tuple[Hashable, tuple[int, ...]]:
    """(what the checks of one kernel look at, the program's buffer behind each local number)."""
    local: dict[int, int] = {}

    def window_form(window: Window) -> Hashable:
        number = local.setdefault(window.buffer, len(local))
        buffer = buffers[window.buffer] if 0 <= window.buffer < len(buffers) else None
        known = None if buffer is None else (buffer.dtype.code, buffer.elems, buffer.space)
        return replace(window, buffer=number, fill=0), exactly(window.fill), known

    return kernel_form(kernel, window_form), tuple(local)
