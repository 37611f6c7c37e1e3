"""A kernel prepared for the reference engine: the instructions of each queue, with operands resolved and windows as views of HBM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tpuflow.device.ordering import TileCells
from tpuflow.device.reference.hazards import HbmShadow
from tpuflow.device.reference.memory import Hbm, OnChip, WindowAccess
from tpuflow.device.resolved import Resolved, resolve
from tpuflow.isa.core_parts import CoreParts
from tpuflow.isa.instruction import QUEUES
from tpuflow.isa.loop_nest import Iteration, LoopNest
from tpuflow.isa.occupancy import vmem_stretches
from tpuflow.isa.program import Buffer, Kernel


class KernelPlan:
    """Everything about a kernel that does not depend on data, built once for a Program."""

    def __init__(self, kernel: Kernel, on_chip: OnChip, hbm: Hbm):
        self.kernel, self.hbm = kernel, hbm
        found = resolve(kernel)
        shadows = _shadows(found.instructions, hbm)
        self.shadows = tuple({id(s): s for s in shadows.values()}.values())
        self.windows = {i.number: WindowAccess(w, hbm, shadows.get(w.buffer)) for i in found.instructions for _, w in i.windows[:1]}
        self.tiles = found.tiles
        self.queues = {name: [[i for i in code if i.queue == q] for q in range(len(QUEUES))] for name, code in found.by_section().items()}
        self.on_chip, self.reach = on_chip, on_chip.reach(self.tiles)
        self.problems = {n: problem for n, t in enumerate(self.tiles) if (problem := self.on_chip.problem(t))}
        self.tile_stretches = vmem_stretches(self.tiles, on_chip.chip)
        self.taken = frozenset(a.window.buffer for a in self.windows.values() if self.takes(hbm.buffers[a.window.buffer]))
        self.nest, self.parts = LoopNest(kernel.grid), CoreParts.of(kernel, on_chip.chip.cores)

    def takes(self, buffer: Buffer) -> bool:
        """Whether tiles of the kernel lie in a buffer's place."""
        low, high = buffer.span
        return any(low < end and start < high for start, end in self.tile_stretches)

    def new_cells(self) -> TileCells:
        """On-chip memory that nothing has touched."""
        return TileCells(self.kernel, self.tiles, self.on_chip.chip)

    def stream(self, queue: int) -> Iterator[tuple[Resolved, Iteration]]:
        """A queue's instructions over the whole grid, in the order in which it executes them."""
        mine = {name: by_queue[queue] for name, by_queue in self.queues.items() if by_queue[queue]}
        for name, at in self.nest.walk(mine) if mine else ():
            for i in mine[name]:
                yield i, at


_Access = tuple[int, str, int]  # buffer, role, queue


def _shadows(found: Sequence[Resolved], hbm: Hbm) -> dict[int, HbmShadow]:
    """The shadow memory for every buffer that two queues may access in conflict (one of them writing)."""
    accesses = {(w.buffer, role, i.queue) for i in found for role, w in i.windows}
    accesses |= {(w.buffer, "read", i.queue) for i in found if i.is_indexed_store for _, w in i.windows}
    clashing: set[int] = set()
    for (x, role, queue), (y, other_role, other) in _sharing(accesses, hbm):
        if queue != other and "write" in (role, other_role):
            clashing |= {x, y}
    return {x: hbm.region(x).shadow for x in clashing}


def _sharing(accesses: Iterable[_Access], hbm: Hbm) -> Iterator[tuple[_Access, _Access]]:
    """Pairs of accesses to buffers that share a byte."""
    order = sorted((a for a in accesses if hbm.buffers[a[0]].bytes), key=lambda a: (hbm.buffers[a[0]].span[0], a))
    open_: list[_Access] = []
    for access in order:
        start = hbm.buffers[access[0]].span[0]
        open_ = [a for a in open_ if hbm.buffers[a[0]].span[1] > start]
        yield from ((a, access) for a in open_)
        open_.append(access)
