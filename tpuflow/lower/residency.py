"""Memory-space assignment: which arrays of a Program stay in VMEM from kernel to kernel, where no kernel's tiles need the place.

Arrays that only kernels touch may: each saves the HBM time of all the moves that it takes part in, and holds its bytes of VMEM from its
first use to its last. They are taken in order of what they save for what they hold, each to the highest gap that is free all that time
above the tiles of the kernels that run meanwhile. Tiles are as they are: no kernel is planned anew for what is left. On a chip of several
cores they are arrays of which every core reads and writes its own part alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tpuflow.chips import Chip
from tpuflow.isa.core_parts import strays
from tpuflow.isa.instruction import Tile
from tpuflow.isa.liveness import Timeline, touched
from tpuflow.isa.loop_nest import LoopNest
from tpuflow.isa.occupancy import tile_end
from tpuflow.isa.program import Buffer, Kernel, Program
from tpuflow.lower.addresses import ALIGNMENT_BYTES, Request, aligned, assign
from tpuflow.lower.lifetimes import FOREVER, Span

TICK_POWERS = (1.0, 0.5)
"""How much it counts that an array is held for long, beside its bytes: of these orders the one that saves most is taken, for neither is
best for all Programs (on tpu-v5e the first is for BERT-large, the second for ResNet-50 and GPT-2)."""


def keep_on_chip(program: Program) -> Program:
    """The same Program with arrays that stay in VMEM, and the others closer together in HBM.

    Needs a chip that keeps arrays (`Chip.keeps_arrays`); as it was on any other. Loops count once.
    """
    if not program.chip.keeps_arrays:
        return program
    timeline = Timeline(program)
    addresses = _places(program, timeline)
    if not addresses:
        return program
    moved = {n: replace(program.buffers[n], address=address, space="vmem") for n, address in addresses.items()}
    return replace(program, buffers=_packed([moved.get(n, b) for n, b in enumerate(program.buffers)], program, timeline))


def _places(program: Program, timeline: Timeline) -> Mapping[int, int]:
    """The address in VMEM of every buffer that stays there, in the order of candidates that saves most."""
    saved = _saved_seconds(program, timeline)
    floors = _floors(timeline, program.chip)
    apart = _of_one_core_each(program, timeline)
    candidates = [n for n in _internal(program, timeline) if saved[n] > 0 and n in apart]
    requests = {n: Request(program.buffers[n].bytes, *timeline.spans[n]) for n in candidates}

    def worth(n: int, power: float) -> tuple[float, int]:
        ticks = requests[n].end - requests[n].start + 1
        return -saved[n] / (requests[n].bytes * ticks**power), n

    orders = [sorted(candidates, key=lambda n, power=power: worth(n, power)) for power in TICK_POWERS]
    found = [_placed({n: requests[n] for n in order}, floors, program.chip) for order in orders]
    return max(found, key=lambda places: sum(saved[n] for n in places))


def _placed(requests: Mapping[int, Request], floors: np.ndarray, chip: Chip) -> Mapping[int, int]:
    """The addresses of those that find a place, asked one after the other."""
    vmem = _Vmem(floors, chip.resident_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES, np.zeros((len(requests), 4), np.int64))
    tried = {n: vmem.place(request) for n, request in requests.items()}
    return {n: address for n, address in tried.items() if address is not None}


def _floors(timeline: Timeline, chip: Chip) -> np.ndarray:
    """The end of the tiles in VMEM at every tick, in the numbering of all cores together."""
    return np.asarray([chip.cores * tile_end(b, "vmem", chip) if isinstance(b, Kernel) else 0 for b in timeline.blocks], np.int64)


def _of_one_core_each(program: Program, timeline: Timeline) -> set[int]:
    """Buffers of which no core touches what another core has (with one core, all)."""
    cores, buffers = program.chip.cores, program.buffers
    if cores == 1:
        return set(range(len(buffers)))
    if ALIGNMENT_BYTES % cores:
        return set()
    windows = {(w, id(k)): k for k in timeline.blocks if isinstance(k, Kernel) for i in k.instructions for _, w in i.windows()}
    strayed = {w.buffer for (w, _), kernel in windows.items() if strays(kernel, w, buffers[w.buffer].elems, cores)}
    return set(range(len(buffers))) - strayed


def _internal(program: Program, timeline: Timeline) -> list[int]:
    """Buffers that only kernels touch, and that are neither in the signature nor constants."""
    outside = {p.buffer for p in (*program.inputs, *program.outputs)} | {c.buffer for c in program.constants}
    outside |= {buffer for block in timeline.blocks if not isinstance(block, Kernel) for buffer, _ in touched(block)}
    return [n for n, b in enumerate(program.buffers) if n in timeline.spans and n not in outside and b.bytes]


def _saved_seconds(program: Program, timeline: Timeline) -> Mapping[int, float]:
    """What the moves of each buffer take in HBM beyond what they take in VMEM."""
    chip = program.chip
    a_byte = (1 / chip.core_bandwidth(chip.cores) - 1 / chip.vmem_bytes_per_second) / chip.cores
    moved: Counter[int] = Counter()
    for kernel in timeline.blocks:
        if isinstance(kernel, Kernel):
            moved.update(_moved_bytes(kernel, chip))
    return {n: moved[n] * a_byte for n in timeline.spans}


def _moved_bytes(kernel: Kernel, chip: Chip) -> Counter[int]:
    """Bytes that a kernel moves to and from each buffer, whole tiles all of them."""
    nest, found = LoopNest(kernel.grid), Counter[int]()
    for name, section in kernel.sections:
        for instruction in section:
            for _, window in instruction.windows():
                found[window.buffer] += nest.runs(name) * instruction.cost(chip, _whole).bus_bytes
    return found


def _whole(tile: Tile) -> tuple[int, ...]:
    return tile.shape


@dataclass(slots=True)
class _Vmem:
    """VMEM over time: `floors` has the end of the tiles at every tick; arrays placed so far as rows (first tick, last, address, end)."""

    floors: np.ndarray
    capacity: int
    placed: np.ndarray
    count: int = 0

    def place(self, request: Request) -> int | None:
        """Take the highest gap that is free from the first to the last tick; its address, None if there is none."""
        size, first, last = aligned(request.bytes), request.start, request.end
        rows = self.placed[: self.count]
        rows = rows[(rows[:, 0] <= last) & (first <= rows[:, 1])]
        rows = rows[np.argsort(-rows[:, 3], kind="stable")]
        floor = self.floors[first : last + 1].max(initial=0)
        above = np.minimum.accumulate(np.concatenate(([self.capacity], rows[:, 2])))  # the end of each gap, downwards
        below = np.append(np.maximum(rows[:, 3], floor), floor)
        fits = np.flatnonzero(above - below >= size)
        if not fits.size:
            return None
        address = int(above[fits[0]]) - size
        self.placed[self.count] = first, last, address, address + size
        self.count += 1
        return address


def _packed(buffers: Sequence[Buffer], program: Program, timeline: Timeline) -> tuple[Buffer, ...]:
    """The buffers with new addresses in HBM, if those make it smaller."""
    there = [n for n, b in enumerate(buffers) if not b.is_resident]
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
