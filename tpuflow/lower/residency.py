"""Memory-space assignment: which arrays of a Program stay on the chip from kernel to kernel, where no kernel needs the place.

Arrays that only kernels touch may stay all their lives; others, and those for which there is not so much room, for a part of it, from or to
a copy in HBM (`stays`). Each saves the HBM time of the moves that it takes part in meanwhile, and holds its bytes of the memory where
arrays stay (`Chip.array_space`) from its first use there to its last. They are taken in order of what they save for what they hold, each
to the highest gap that is free all that time above what the kernels that run meanwhile take of that memory: of VMEM their tiles, of CMEM
what they read again from it. Kernels are as they are: none is planned anew for what is left. In the VMEM of several cores they are arrays
of which every core reads and writes its own part alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tpuflow.isa.liveness import Timeline, touched
from tpuflow.isa.occupancy import tile_ends
from tpuflow.isa.program import Buffer, Kernel, Program
from tpuflow.lower.addresses import ALIGNMENT_BYTES, Request, aligned, assign
from tpuflow.lower.copies import Placed, with_copies
from tpuflow.lower.lifetimes import FOREVER, Span
from tpuflow.lower.stays import Bus, Stay, Stays

TICK_POWERS = (1.0, 0.5, 0.25)
"""How much it counts that an array is held for long, beside its bytes: of these orders the one that saves most is taken, for none is best
for all Programs (the first is for BERT-large on tpu-v5e, the second for GPT-2 there, the third for ResNet-50 on tpu-v5p)."""


def keep_on_chip(program: Program, replaced: Sequence[tuple[int, int]] = ()) -> Program:
    """The same Program with arrays that stay on the chip, copies between HBM and there, and what is in HBM closer together.

    Arrays stay if the chip has a place for them (`Chip.array_space`). Loops count once. `replaced`, as a plan has it (`MemoryPlan`):
    buffers that become one if both are still in HBM.
    """
    timeline = Timeline(program)
    placed = _placed(program, timeline)
    if not placed and not replaced:
        return program
    made = with_copies(program, timeline, placed, replaced)
    return replace(made, buffers=_packed(made, Timeline(made))) if placed else made


def _placed(program: Program, timeline: Timeline) -> Sequence[Placed]:
    """What stays, and where, in the order of candidates that saves most; with copies only if that is more than without any."""
    if not program.chip.array_space or ALIGNMENT_BYTES % program.chip.cores:
        return ()
    hosts = frozenset(b for block in timeline.blocks if not isinstance(block, Kernel) for b, _ in touched(block))
    bus = Bus.of(program, timeline)
    candidates = list(Stays.of(program, timeline, bus, hosts).all(range(len(program.buffers))))
    floors = _FLOORS[program.chip.array_space](timeline, bus)

    sizes = [buffer.bytes for buffer in program.buffers]

    def worth(stay: Stay, power: float) -> tuple[bool, float, int, int]:
        ticks = stay.last - stay.first + 1
        small = stay.begins is not None and stay.saved_bytes * bus.a_byte <= program.chip.dma_seconds
        return small, -stay.saved_bytes / (sizes[stay.buffer] * ticks**power), stay.first, stay.buffer

    without_copies = [stay for stay in candidates if stay.begins is None]
    found = [
        _chosen(sorted(some, key=lambda stay, power=power: worth(stay, power)), program, bus.copy(), floors)
        for some, power in (*((candidates, power) for power in TICK_POWERS), (without_copies, TICK_POWERS[1]))
    ]
    return max(found, key=lambda placed: sum(p.stay.saved_bytes for p in placed))


def _chosen(stays: Sequence[Stay], program: Program, bus: Bus, floors: np.ndarray) -> list[Placed]:
    """Those that find a place, asked one after the other. A buffer stays more than once only with copies, at times apart: what one stay
    copies to HBM has arrived there before another begins."""
    capacity = program.chip.resident_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    memory = _Memory.of(floors, capacity)
    made: dict[int, list[Stay]] = defaultdict(list)
    found: list[Placed] = []
    for stay in stays:
        size, others = program.buffers[stay.buffer].bytes, made[stay.buffer]
        if any(stay.begins is None or o.begins is None or (o.first <= stay.last + 1 and stay.first <= o.last + 1) for o in others):
            continue
        if stay.begins is not None and not bus.gains(stay, size):
            continue
        address = memory.place(Request(size, stay.first, stay.last))
        if address is not None:
            others.append(stay)
            bus.move(stay, size)
            found.append(Placed(stay, address))
    return found


def _tile_ends(timeline: Timeline, bus: Bus) -> np.ndarray:
    """The end of the tiles in VMEM at every tick, in the numbering of all cores together."""
    ends = tile_ends(bus.program, "vmem")
    return bus.chip.cores * np.asarray([ends[id(b)] if isinstance(b, Kernel) else 0 for b in timeline.blocks], np.int64)


def _read_again(timeline: Timeline, bus: Bus) -> np.ndarray:
    """What kernels read again from CMEM, at every tick."""
    return np.asarray(bus.again, np.int64)


_FLOORS: Mapping[str, Callable[[Timeline, Bus], np.ndarray]] = {"vmem": _tile_ends, "cmem": _read_again}
"""What is taken of each memory where arrays stay."""


@dataclass(slots=True)
class _Memory:
    """A memory over time: `floors` has what kernels take at every tick; arrays placed so far as rows (first tick, last, address, end), from
    the highest end to the lowest, between all that is above the memory and its beginning."""

    floors: np.ndarray
    placed: np.ndarray

    @classmethod
    def of(cls, floors: np.ndarray, capacity: int) -> _Memory:
        """Without arrays, of so many bytes."""
        return cls(floors, np.array([(0, FOREVER, capacity, FOREVER), (0, FOREVER, 0, 0)], np.int64))

    def place(self, request: Request) -> int | None:
        """Take the highest gap that is free from the first to the last tick; its address, None if there is none."""
        size, first, last = aligned(request.bytes), request.start, request.end
        placed, floor = self.placed, self.floors[first : last + 1].max(initial=0)
        if placed[0, 2] - floor < size:
            return None
        rows = placed[(placed[:, 0] <= last) & (placed[:, 1] >= first)]
        above = np.minimum.accumulate(rows[:-1, 2])  # the end of each gap, downwards
        fits = (above - np.maximum(rows[1:, 3], floor) >= size).nonzero()[0]
        if not fits.size:
            return None
        address = int(above[fits[0]]) - size
        at = int(np.count_nonzero(placed[:, 3] >= address + size))
        self.placed = np.concatenate((placed[:at], [(first, last, address, address + size)], placed[at:]))
        return address


def _packed(program: Program, timeline: Timeline) -> tuple[Buffer, ...]:
    """The buffers with new addresses in HBM, if those make it smaller."""
    buffers = program.buffers
    there = [n for n, b in enumerate(buffers) if b.space == "hbm"]
    spans = timeline.spans | _signature_spans(program, timeline)
    addresses, end = assign([Request(buffers[n].bytes, *spans.get(n, (0, 0))) for n in there])
    if end >= max((buffers[n].address + buffers[n].bytes for n in there), default=0):
        return tuple(buffers)
    made = list(buffers)
    for n, address in zip(there, addresses, strict=True):
        made[n] = replace(buffers[n], address=address)
    return tuple(made)


def _signature_spans(program: Program, timeline: Timeline) -> dict[int, Span]:
    """Ticks of what the host owns: outputs stay to the end, constants and inputs that are not given away all the time."""
    outputs = {p.buffer: (timeline.spans[p.buffer][0], FOREVER) for p in program.outputs if p.buffer in timeline.spans}
    kept = [*(c.buffer for c in program.constants), *(p.buffer for p in program.inputs if not p.donated)]
    return outputs | dict.fromkeys(kept, (0, FOREVER))
