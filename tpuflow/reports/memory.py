"""What lies in HBM when: every buffer with its category, lifetime, layer and source line; the timeline of live bytes and its peak.

All of it is found in the Program itself: lifetimes from the accesses of its blocks, categories from the signature and from the name
stacks in its debug section.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpuflow.chips.chip import Chip
from tpuflow.isa.collectives import Await, Collective, Position
from tpuflow.isa.instruction import Tile
from tpuflow.isa.program import Block, Buffer, Infeed, Kernel, Loop, Outfeed, Program, Switch, While, children
from tpuflow.reports.layers import BACKWARD, FORWARD, UPDATE, Layer, layer_of

CATEGORIES = ("parameters", "optimizer", "gradients", "activations", "constants", "infeed", "arguments", "results")
"""What HBM holds. Gradients are what the backward pass makes, activations what the forward pass makes (again, too), optimizer its state
and what the update makes; arguments and results are inputs and outputs that are none of these."""

_OPTIMIZER_WORDS = frozenset(("opt_state", "optimizer", "mu", "nu"))
_PARAMETER_WORDS = frozenset(("params", "batch_stats", "carried"))
_MADE_IN = {FORWARD: "activations", BACKWARD: "gradients", UPDATE: "optimizer"}
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Allocation:
    """A buffer of HBM: `first` and `last` are the ticks between which it is needed (both included), `layer` the module path of what is
    in it, `source` the user's line that makes it (an argument's is empty)."""

    buffer: int
    name: str
    type: str
    bytes: int
    address: int
    category: str
    first: int
    last: int
    layer: str
    source: str

    def line(self) -> str:
        """One line of text."""
        place = " ".join(filter(None, (self.layer, self.source and f"at {self.source}"))) or self.name
        return f"{self.bytes / MIB:10.2f} MiB  {self.category:11} {self.type:24} {place}"


@dataclass(frozen=True, slots=True)
class OnChip:
    """Bytes of on-chip memory that one kernel uses at its place in the Program."""

    place: str
    name: str
    vmem_bytes: int
    acc_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """A Program's HBM over time. A tick is one block that does something; `places` has each tick's place in the Program.

    `live_bytes` has, for each category, the bytes that are needed at every tick. `planned_bytes` is what the plan takes: the highest
    address in use, alignment and gaps included.
    """

    chip: Chip
    allocations: tuple[Allocation, ...]
    places: tuple[str, ...]
    live_bytes: Mapping[str, tuple[int, ...]]
    planned_bytes: int
    kernels: tuple[OnChip, ...] = field(repr=False)

    @property
    def timeline(self) -> tuple[int, ...]:
        """Live bytes of all categories at every tick."""
        return tuple(map(sum, zip(*self.live_bytes.values(), strict=True)))

    @property
    def peak_tick(self) -> int:
        """The (first) tick at which most is live."""
        live = self.timeline
        return max(range(len(live)), key=live.__getitem__, default=0)

    @property
    def peak_bytes(self) -> int:
        """Most bytes live at once."""
        return max(self.timeline, default=0)

    @property
    def peak_by_category(self) -> dict[str, int]:
        """Bytes of each category at the peak."""
        at = self.peak_tick
        return {name: series[at] for name, series in self.live_bytes.items() if series and series[at]}

    def at_peak(self, most: int | None = None) -> tuple[Allocation, ...]:
        """The allocations that are live at the peak, largest first."""
        at = self.peak_tick
        live = sorted((a for a in self.allocations if a.first <= at <= a.last), key=lambda a: (-a.bytes, a.buffer))
        return tuple(live[:most])

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {n / MIB:.2f}" for name, n in self.peak_by_category.items())
        place = self.places[self.peak_tick] if self.places else "-"
        lines = [
            f"HBM: {self.planned_bytes / MIB:.2f} MiB planned of {self.chip.available_hbm_bytes / MIB:.0f}; at most "
            f"{self.peak_bytes / MIB:.2f} MiB live, at block {place}: {shares or 'nothing'}",
            *(a.line() for a in self.at_peak(10)),
        ]
        most = max(self.kernels, key=lambda k: k.vmem_bytes, default=None)
        if most:
            lines.append(f"VMEM: at most {most.vmem_bytes / 1024:.0f} KiB of {self.chip.vmem_bytes / 1024:.0f}, in {most.name}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "planned_bytes": self.planned_bytes,
            "available_bytes": self.chip.available_hbm_bytes,
            "peak_bytes": self.peak_bytes,
            "peak_place": self.places[self.peak_tick] if self.places else "",
            "peak_by_category": self.peak_by_category,
            "at_peak": [_plain(a) for a in self.at_peak(50)],
            "places": list(self.places),
            "live_bytes": {name: list(series) for name, series in self.live_bytes.items() if any(series)},
            "on_chip": [{"place": k.place, "name": k.name, "vmem_bytes": k.vmem_bytes, "acc_bytes": k.acc_bytes} for k in self.kernels],
        }


def memory_map(program: Program) -> MemoryMap:
    """The memory of a Program over its blocks; loops count once."""
    walk = _Timeline(program)
    walk.blocks(program.code, "")
    end = max(len(walk.places) - 1, 0)
    provenance = _Provenance.of(program, walk)
    allocations = tuple(provenance.allocation(i, end) for i in range(len(program.buffers)) if i in walk.spans)
    live = {name: _series([a for a in allocations if a.category == name], end + 1) for name in CATEGORIES}
    kernels = tuple(on_chip(place, kernel, program.chip) for place, kernel in walk.kernels)
    top = max((b.address + b.bytes for b in program.buffers), default=0)
    return MemoryMap(program.chip, allocations, tuple(walk.places), live, top, kernels)


def on_chip(place: str, kernel: Kernel, chip: Chip) -> OnChip:
    """Bytes of VMEM and of the accumulators up to the highest one in use."""
    top: Counter[str] = Counter()
    for tile in {t for i in kernel.instructions for t in itertools.chain(i.reads(), i.writes())}:
        top[tile.space] = max(top[tile.space], tile.address + _tile_bytes(tile, chip))
    return OnChip(place, kernel.title, top["vmem"], top["acc"])


def _tile_bytes(tile: Tile, chip: Chip) -> int:
    return tile.slots * chip.tile_bytes(tile.shape, tile.dtype.bytes)


def _plain(a: Allocation) -> dict[str, Any]:
    return {name: getattr(a, name) for name in Allocation.__dataclass_fields__}


def _series(allocations: Sequence[Allocation], ticks: int) -> tuple[int, ...]:
    changes = [0] * (ticks + 1)
    for a in allocations:
        changes[a.first] += a.bytes
        changes[a.last + 1] -= a.bytes
    return tuple(itertools.accumulate(changes[:-1]))


# --- lifetimes --------------------------------------------------------------------------------------------------------


class _Timeline:
    """Goes over the blocks; `spans` has the first and last tick of every buffer, as the memory planner counts them.

    A buffer that a loop finds already there stays until the loop ends, for the next trip may need it.
    """

    def __init__(self, program: Program) -> None:
        self.places: list[str] = []
        self.kernels: list[tuple[str, Kernel]] = []
        self.makers: dict[int, tuple[Block, str]] = {}
        self.started: dict[int, Collective] = {}
        self.spans: dict[int, tuple[int, int]] = {p.buffer: (0, 0) for p in program.inputs}
        self.spans |= {c.buffer: (0, 0) for c in program.constants}

    def blocks(self, code: Sequence[Block], path: str) -> None:
        """Every block of a list, in order."""
        for i, block in enumerate(code):
            self._block(block, f"{path}{i}")

    def _block(self, block: Block, place: str) -> None:
        self._tick(block, place)
        start = len(self.places)
        for name, nested in children(block):
            self.blocks(nested, f"{place}.{name}.")
        if isinstance(block, Loop | While):
            self._stay(start)

    def _stay(self, start: int) -> None:
        end = len(self.places) - 1
        for buffer, (first, last) in self.spans.items():
            if first < start <= last:
                self.spans[buffer] = first, end

    def _tick(self, block: Block, place: str) -> None:
        now = len(self.places)
        self.places.append(place)
        if isinstance(block, Kernel):
            self.kernels.append((place, block))
        if isinstance(block, Collective):
            self.started[block.semaphore] = block
        for buffer, source in _touched(self.started[block.semaphore] if isinstance(block, Await) else block):
            if buffer not in self.spans:
                self.spans[buffer] = now, now
                self.makers[buffer] = block, source
            self.spans[buffer] = self.spans[buffer][0], now


def _touched(block: Block) -> Iterator[tuple[int, str]]:
    """The buffers that a block itself reads or writes, each with the source line of that; writes come first."""
    match block:
        case Kernel():
            lines = itertools.chain(block.sources, itertools.repeat(""))
            used = [(role, w.buffer, line) for i, line in zip(block.instructions, lines, strict=False) for role, w in i.windows()]
            yield from ((buffer, line) for _, buffer, line in sorted(used, key=lambda u: u[0] != "write"))
        case Loop():
            yield block.trips, ""
        case While():
            yield block.predicate, ""
        case Switch():
            yield block.index, ""
        case Infeed() | Outfeed() | Position():
            yield block.buffer, ""
        case Collective():
            yield block.target, block.where
            yield block.source, block.where


# --- provenance -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Provenance:
    """Says of every buffer what it is for: from the signature if it is part of it, else from what made it."""

    program: Program
    walk: _Timeline
    inputs: Mapping[int, str]
    kept: frozenset[int]
    outputs: frozenset[int]
    trains: bool

    @classmethod
    def of(cls, program: Program, walk: _Timeline) -> _Provenance:
        """Look at the signature, and whether there is a backward pass."""
        constants = {c.buffer: "constants" for c in program.constants}
        inputs = {p.buffer: _input_category(p.name) for p in program.inputs}
        kept = frozenset([*constants, *(p.buffer for p in program.inputs if not p.donated)])
        trains = any(layer_of(k.scope).phase == BACKWARD for k in program.kernels())
        return cls(program, walk, inputs | constants, kept, frozenset(p.buffer for p in program.outputs), trains)

    def allocation(self, number: int, end: int) -> Allocation:
        """One buffer; what the host owns stays: outputs to the end, inputs that are not given away and constants all the time."""
        buffer = self.program.buffers[number]
        name = self.program.buffer_names[number] if self.program.buffer_names else f"buffer {number}"
        maker, source = self.walk.makers.get(number, (None, ""))
        layer = layer_of(self._scope(name, maker))
        first, last = self.walk.spans[number]
        if number in self.kept:
            first, last = 0, end
        elif number in self.outputs:
            last = end
        category = self.inputs.get(number) or self._made(number, maker, layer)
        return Allocation(number, name, _type(buffer), buffer.bytes, buffer.address, category, first, last, layer.path, source)

    def _scope(self, name: str, maker: Block | None) -> str:
        """The name stack of what made a buffer; of a copy, that of the kernel."""
        if maker is None:
            return ""
        if not self.program.buffer_names or name == "copy":
            return maker.scope if isinstance(maker, Kernel) else ""
        return name.rpartition("/")[0]

    def _made(self, number: int, maker: Block | None, layer: Layer) -> str:
        if isinstance(maker, Infeed):
            return "infeed"
        if number in self.outputs:
            return "results"
        return _MADE_IN[layer.phase] if self.trains and not layer.recomputed else "activations"


def _input_category(name: str) -> str:
    words = set(name.split("/"))
    if words & _OPTIMIZER_WORDS:
        return "optimizer"
    return "parameters" if words & _PARAMETER_WORDS else "arguments"


def _type(buffer: Buffer) -> str:
    return f"{buffer.dtype}[{','.join(map(str, buffer.shape))}]"
