"""What a kernel's time depends on, as a key: all but names, source lines, and which buffers of a memory its windows are on."""

from __future__ import annotations

from collections.abc import Hashable, Set
from dataclasses import replace

from tpuflow.device.kernel_keys import kernel_form
from tpuflow.isa.instruction import Window
from tpuflow.isa.program import Kernel


def form_of(kernel: Kernel, resident: Set[int] = frozenset()) -> Hashable:
    """Equal for kernels that take the same time on any chip; buffers are numbered in order of appearance, `resident` ones stay there."""
    numbers: dict[int, int] = {}

    def window_form(window: Window) -> Hashable:
        return replace(window, buffer=numbers.setdefault(window.buffer, len(numbers))), window.buffer in resident

    return kernel_form(kernel, window_form)
