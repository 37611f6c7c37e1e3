"""What a kernel's verdict depends on: its text with buffers numbered in order of use. Equal structures are checked once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from tpuflow.isa.program import Buffer, Kernel


def structure(kernel: Kernel, buffers: Sequence[Buffer]) -> tuple[Hashable, tuple[int, ...]]:
    """(what the checks of one kernel look at, the program's buffer behind each local number)."""
    local: dict[int, int] = {}
    sections = (kernel.prologue, kernel.body, kernel.epilogue)
    text = tuple(tuple(_instruction(i, buffers, local) for i in section) for section in sections)
    return (kernel.grid, kernel.semaphores, text), tuple(local)


def _instruction(i: Any, buffers: Sequence[Buffer], local: dict[int, int]) -> Hashable:
    window = getattr(i, "window", None)
    if window is None:
        return i
    number = local.setdefault(window.buffer, len(local))
    buffer = buffers[window.buffer] if 0 <= window.buffer < len(buffers) else None
    known = None if buffer is None else (buffer.dtype.code, buffer.elems)
    rest = (getattr(i, "index", None), getattr(i, "mode", None))
    return type(i), number, known, window.tile, window.axes, window.fill, rest
