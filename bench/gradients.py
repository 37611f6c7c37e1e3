"""When the gradients of a step are ready, and how their sums over several chips are split: what of them the backward pass can hide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

from tpuflow.chips import Chip
from tpuflow.chips.links import all_reduce_seconds
from tpuflow.device.timing.result import ProgramTime
from tpuflow.isa.program import Kernel, Program, walk

GRADIENT_BYTES = 4  # summed in f32
BACKWARD = "transpose("  # what the names of kernels of the backward pass begin with
Ready = tuple[int, float]
"""Bytes of a gradient, and the share of a step's time between it and the last one."""


def ready(program: Program, time: ProgramTime, parameters: Sequence[tuple[int, ...]]) -> tuple[Ready, ...]:
    """The gradients of parameters of these shapes, in the order in which the timed Program has them.

    A kernel of the backward pass that stores a parameter's shape makes its gradient. Those that none is found to store count as the last.
    """
    shape_of = {place: _stored(block, program) for place, block in walk(program.code) if isinstance(block, Kernel)}
    ends = list(accumulate(row.picoseconds for row in time.kernels))
    missing, found = Counter(map(_plain, parameters)), []
    for row, end in zip(time.kernels, ends, strict=True):
        for shape in shape_of[row.place] if row.time.name.startswith(BACKWARD) else ():
            if missing[shape]:
                missing[shape] -= 1
                found.append((_bytes(shape), end))
    last = found[-1][1] if found else 0
    whole = max(ends, default=1)
    return (*((size, (last - end) / whole) for size, end in found), *((_bytes(shape), 0.0) for shape in missing.elements()))


def sums(gradients: Sequence[Ready], splits: Sequence[int], chip: Chip, chips: int) -> tuple[tuple[float, float], ...]:
    """(seconds, share of the step before the last gradient) of every sum: one begins after each number of gradients in `splits`."""
    cuts = sorted({0, *(min(s, len(gradients)) for s in splits), len(gradients)})
    groups = [gradients[a:b] for a, b in pairwise(cuts)]
    return tuple((all_reduce_seconds(chip, sum(size for size, _ in group), chips), group[-1][1]) for group in groups)


def _stored(kernel: Kernel, program: Program) -> tuple[tuple[int, ...], ...]:
    written = {w.buffer for i in kernel.instructions if i.windowed for role, w in i.windows() if role == "write"}
    return tuple(_plain(program.buffers[b].shape) for b in sorted(written))


def _plain(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without axes of one element, in which compilers take liberties, as with their order."""
    return tuple(sorted(n for n in shape if n != 1))


def _bytes(shape: Sequence[int]) -> int:
    size = GRADIENT_BYTES
    for n in shape:
        size *= n
    return size
