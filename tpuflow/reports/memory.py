"""What lies in memory when: every buffer with its category, lifetime, layer and source line; the timelines of HBM and of what is at the
host, and the peak of HBM.

All of it is found in the Program itself: lifetimes from the accesses of its blocks, categories from the signature and from the name
stacks in its debug section.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tpuflow.chips.chip import Chip
from tpuflow.isa.liveness import Timeline
from tpuflow.isa.occupancy import tile_ends
from tpuflow.isa.program import Block, Buffer, Infeed, Kernel, Program
from tpuflow.reports.layers import BACKWARD, FORWARD, UPDATE, Layer, layer_of

CATEGORIES = ("parameters", "optimizer", "gradients", "activations", "constants", "infeed", "arguments", "results")
"""What HBM holds. Gradients are what the backward pass makes, activations what the forward pass makes (again, too), optimizer its state
and what the update makes; arguments and results are inputs and outputs that are none of these."""

_OPTIMIZER_WORDS = frozenset(("opt_state", "optimizer", "mu", "nu"))
_PARAMETER_WORDS = frozenset(("params", "batch_stats", "carried"))
_MADE_IN = {FORWARD: "activations", BACKWARD: "gradients", UPDATE: "optimizer"}
ON_CHIP = ("vmem", "cmem")
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Allocation:
    """A buffer at `address` of HBM, VMEM, CMEM or the host's memory (`space`): `first` and `last` are the ticks between which it is needed
    (both included), `layer` the module path of what is in it, `source` the user's line that makes it (an argument's is empty)."""

    buffer: int
    name: str
    type: str
    bytes: int
    space: str
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
    """Bytes of on-chip memory that the tiles of one kernel take at its place in the Program, and arrays that stay on the chip meanwhile."""

    place: str
    name: str
    vmem_bytes: int
    acc_bytes: int
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """A Program's memory over time. A tick is one block that does something; `places` has each tick's place in the Program.

    `live_bytes` has, for each category, the bytes of HBM that are needed at every tick, `resident_bytes` those of arrays on the chip,
    `host_bytes` those of arrays in the host's memory.
    `planned_bytes` is what the plan takes: the highest address in use, alignment and gaps included.
    """

    chip: Chip
    allocations: tuple[Allocation, ...]
    places: tuple[str, ...]
    live_bytes: Mapping[str, tuple[int, ...]]
    planned_bytes: int
    resident_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
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
        """The allocations of HBM that are live at the peak, largest first."""
        at = self.peak_tick
        live = sorted((a for a in self.allocations if a.space == "hbm" and a.first <= at <= a.last), key=lambda a: (-a.bytes, a.buffer))
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
        stay, at_host = ([a for a in self.allocations if a.space in spaces] for spaces in (ON_CHIP, ("host",)))
        if at_host:
            most_bytes = max(self.host_bytes)
            lines.append(f"host memory: {len(at_host)} arrays lie there, at most {most_bytes / MIB:.2f} MiB at once")
        if stay:
            where, most_bytes = self.chip.array_space.upper(), max(self.resident_bytes)
            lines.append(f"{where}: {len(stay)} arrays stay there, at most {most_bytes / 1024:.0f} KiB at once")
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
            "resident_bytes": list(self.resident_bytes),
            "host_bytes": list(self.host_bytes),
            "on_chip": [_plain(k) for k in self.kernels],
        }


def memory_map(program: Program) -> MemoryMap:
    """The memory of a Program over its blocks; loops count once."""
    walk = Timeline(program)
    end = max(len(walk.places) - 1, 0)
    provenance = _Provenance.of(program, walk)
    allocations = tuple(provenance.allocation(i, end) for i in range(len(program.buffers)) if i in walk.spans)
    in_hbm, resident, at_host = ([a for a in allocations if a.space in spaces] for spaces in (("hbm",), ON_CHIP, ("host",)))
    live = {name: _series([a for a in in_hbm if a.category == name], end + 1) for name in CATEGORIES}
    stays = _series(resident, end + 1)
    vmem, accumulators = (tile_ends(program, space) for space in ("vmem", "acc"))
    kernels = tuple(
        OnChip(walk.places[n], block.title, vmem[id(block)], accumulators[id(block)], stays[n])
        for n, block in enumerate(walk.blocks)
        if isinstance(block, Kernel)
    )
    return MemoryMap(program.chip, allocations, tuple(walk.places), live, program.hbm_bytes, stays, _series(at_host, end + 1), kernels)


def _plain(record: Allocation | OnChip) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(record)}


def _series(allocations: Sequence[Allocation], ticks: int) -> tuple[int, ...]:
    changes = [0] * (ticks + 1)
    for a in allocations:
        changes[a.first] += a.bytes
        changes[a.last + 1] -= a.bytes
    return tuple(itertools.accumulate(changes[:-1]))


# --- provenance -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Provenance:
    """Says of every buffer what it is for: from the signature if it is part of it, else from what made it."""

    program: Program
    walk: Timeline
    inputs: Mapping[int, str]
    kept: frozenset[int]
    outputs: frozenset[int]
    trains: bool

    @classmethod
    def of(cls, program: Program, walk: Timeline) -> _Provenance:
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
        return Allocation(
            number, name, _type(buffer), buffer.bytes, buffer.space, buffer.address, category, first, last, layer.path, source
        )

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
