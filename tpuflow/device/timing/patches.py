"""Which loads cut patches: windows that a kernel reads beside shifted copies of themselves, as pooling and its gradient do."""

from __future__ import annotations

from tpuflow.isa.instruction import Window
from tpuflow.isa.program import Kernel


def patches(kernel: Kernel) -> frozenset[Window]:
    """The windows among which another one of the same kernel runs over the same rows of the same buffer, shifted."""
    read = [w for i in kernel.instructions for role, w in i.windows() if role == "read" and w.tile.axes]
    by_buffer: dict[int, list[Window]] = {}
    for window in dict.fromkeys(read):
        by_buffer.setdefault(window.buffer, []).append(window)
    return frozenset(w for group in by_buffer.values() for w in group if any(_shifted(w, other) for other in group))


def _shifted(one: Window, other: Window) -> bool:
    """Whether windows differ by a shift that leaves them on common ground; slices of a buffer do not."""
    if one is other or len(one.axes) != len(other.axes):
        return False
    pairs = list(zip(one.axes, other.axes, one.tile.axes, other.tile.axes, strict=True))
    alike = all((a.extent, a.pitch, a.step, s) == (b.extent, b.pitch, b.step, t) for a, b, s, t in pairs)
    near = all(abs(a.origin - b.origin) < max(1, abs(a.step)) * max(s.size, s.extent) for a, b, s, _ in pairs)
    return alike and near and any(a.origin != b.origin for a, b, _, _ in pairs)
