"""`Comparison`: the result of `tpuflow.compare`, as text and as plain data."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tpuflow.comparing.collectives import Sent, by_kind, largest
from tpuflow.device.timing.result import seconds_text
from tpuflow.reports.files import PlainData, write_text

SHOWN = 12
EXPLAINED = 3
NAMED = 4
BESIDE_HBM: Mapping[str, tuple[str, str]] = {
    "vmem_bytes": ("VMEM", "kept in VMEM"),
    "cmem_bytes": ("CMEM", "kept in CMEM"),
    "smem_bytes": ("SMEM", "kept in SMEM"),
    "host_bytes": ("the host's memory", "to and from the host"),
}
"""Other memories than HBM, by the fields of `KernelCosts`: their names, and the rows of the totals, which are left out where both sides
would say 0.00 MB, as that of padding is."""
ON_CHIP = ("vmem_bytes", "cmem_bytes", "smem_bytes")
US, THEM = "tpuflow", "XLA:TPU"
FAR = 99
"""Larger ratios are printed as ">99"."""
_NUMBER = re.compile(r"_\d+(?=/|$)")


@dataclass(frozen=True, slots=True)
class KernelCosts:
    """The cost of kernels: executions; bytes to and from HBM, and the part of these that is prefetched; bytes of operands and results that
    stay in VMEM, CMEM or SMEM between kernels; bytes to and from the host's memory; what layouts add to the bytes to and from HBM, since
    they have whole tiles; the time of products and convolutions."""

    kernels: int = 0
    hbm_bytes: int = 0
    prefetched_bytes: int = 0
    vmem_bytes: int = 0
    cmem_bytes: int = 0
    smem_bytes: int = 0
    host_bytes: int = 0
    padding_bytes: int = 0
    product_seconds: float = 0.0

    def __add__(self, other: KernelCosts) -> KernelCosts:
        return KernelCosts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(KernelCosts)))


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel of ours, or an instruction of the vendor's schedule, with all its executions."""

    what: str
    source: str
    costs: KernelCosts


def total(work: Iterable[Work]) -> KernelCosts:
    """All together."""
    return sum((one.costs for one in work), KernelCosts())


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two compilations: the bytes of HBM of its arguments and temporaries, its total cost, and its collectives."""

    argument_bytes: int
    temp_bytes: int
    costs: KernelCosts
    collectives: tuple[Sent, ...] = ()

    @property
    def sent_bytes(self) -> int:
        """What a chip sends."""
        return sum(one.sent_bytes for one in self.collectives)

    @property
    def beside_bytes(self) -> int:
        """What of that goes on beside computation."""
        return sum(one.beside_bytes for one in self.collectives)

    @property
    def waited_seconds(self) -> float:
        """Modelled, for how long the chip waits for what is sent; of our side only."""
        return sum(one.exposed_seconds or 0.0 for one in self.collectives)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {**asdict(self), "sent_bytes": self.sent_bytes, "beside_bytes": self.beside_bytes}


@dataclass(frozen=True, slots=True)
class LayerRow:
    """A module path in one phase, with the work of both compilations there."""

    layer: str
    phase: str
    ours: tuple[Work, ...]
    theirs: tuple[Work, ...]

    @property
    def difference(self) -> int:
        """HBM bytes of ours beyond the vendor's."""
        return total(self.ours).hbm_bytes - total(self.theirs).hbm_bytes

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        sides = {name: [asdict(work) for work in side] for name, side in (("ours", self.ours), ("theirs", self.theirs))}
        sums = {f"{name}_total": asdict(total(side)) for name, side in (("ours", self.ours), ("theirs", self.theirs))}
        return {"layer": self.layer, "phase": self.phase, "difference_bytes": self.difference, **sums, **sides}


@dataclass(frozen=True, slots=True)
class Comparison(PlainData):
    """`tpuflow.compare`'s answer: both compiles in all and by layer, the largest difference first; `str` prints it.

    Bytes are those of arrays without padding; what theirs have of it in HBM is `padding_bytes`. Times of products are modelled on our
    side, and on theirs the cycles that XLA:TPU expects over the chip's clock, of one of `devices_a_chip` devices. `uncounted`: loops of
    theirs of unknown length, which count as one trip. `mesh`: its axes, of a step on several chips; then everything is of one of them.
    """

    name: str
    chip: str
    policy: str
    devices_a_chip: int
    uncounted: int
    ours: Side
    theirs: Side
    layers: tuple[LayerRow, ...]
    mesh: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, most: int = SHOWN) -> str:
        """The totals, so many layers, and what makes the largest differences."""
        rows = self.rows()
        rest = len(rows) - most
        more = [f"... and {rest} more rows"] if rest > 0 else []
        sent = ["", *self.sent()] if self.ours.collectives or self.theirs.collectives else []
        parts = [*self._totals(), *sent, "", *_table(rows[:most]), *more, "", *_explained(rows[:EXPLAINED])]
        return "\n".join([self.title, *self.remarks(), "", *parts])

    @property
    def title(self) -> str:
        """What was compiled, for what."""
        sizes = ", ".join(f"{name} {size}" for name, size in self.mesh.items())
        chips = f" x {math.prod(self.mesh.values())} ({sizes})" if self.mesh else ""
        return f"{self.name} on {self.chip}{chips}{f' in {self.policy}' if self.policy else ''}: tpuflow beside XLA:TPU"

    def remarks(self) -> list[str]:
        """What to know about XLA:TPU's side."""
        device = f"XLA:TPU compiles for one device, of which {self.devices_a_chip} are a chip"
        loops = f"{self.uncounted} loops of XLA:TPU's have an unknown length and count as one trip"
        return [text for text, holds in ((device, self.devices_a_chip > 1), (loops, self.uncounted)) if holds]

    def rows(self) -> list[LayerRow]:
        """The layers, those that differ in a number only as one; the largest difference first."""
        return _alike_as_one(self.layers)

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page.

        Raises:
          ConfigError: the file cannot be written.
        """
        from tpuflow.comparing.comparison_page import comparison_page

        write_text(path, comparison_page(self))

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data: seconds and bytes."""
        plain = {name: getattr(self, name) for name in ("name", "chip", "policy", "devices_a_chip", "uncounted")} | {
            "mesh": dict(self.mesh)
        }
        return {**plain, "ours": self.ours.as_dict(), "theirs": self.theirs.as_dict(), "layers": [row.as_dict() for row in self.layers]}

    def sent(self) -> list[str]:
        """What a chip sends, in all and by kind of collective, and the largest of either side."""
        a, b = self.ours, self.theirs
        rows = [("sent by a chip", a.sent_bytes, b.sent_bytes), ("  beside computation", a.beside_bytes, b.beside_bytes)]
        counts = [f"{'collectives':20} {_counted(a.collectives):>14} {_counted(b.collectives):>14}"]
        kinds, own, other = [], by_kind(a.collectives), by_kind(b.collectives)
        for kind in dict.fromkeys([*own, *other]):
            one, two = own.get(kind, []), other.get(kind, [])
            kinds.append((f"  {kind} {_counted(one)}/{_counted(two)}", sum(c.sent_bytes for c in one), sum(c.sent_bytes for c in two)))
        lines = [f"{name:20} {megabytes(x):>14} {megabytes(y):>14} {ratio_text(x, y):>7}" for name, x, y in (*rows, *kinds)]
        waited = [f"tpuflow's chip waits {seconds_text(a.waited_seconds)} for what is sent"] if a.collectives else []
        return [*lines[:2], *counts, *lines[2:], *waited, *_sent_most("tpuflow", a), *_sent_most("XLA:TPU", b)]

    def totals(self) -> list[tuple[str, str, str, str]]:
        """What is compared in all: its name, ours, theirs, and ours over theirs."""
        a, b = self.ours.costs, self.theirs.costs
        kept = [(title, getattr(a, name), getattr(b, name), megabytes) for name, (_, title) in BESIDE_HBM.items()]
        padded = [("  padding beside it", a.padding_bytes, b.padding_bytes, megabytes)]
        found = (
            ("HBM traffic", a.hbm_bytes, b.hbm_bytes, megabytes),
            ("  while others run", a.prefetched_bytes, b.prefetched_bytes, megabytes),
            *(row for row in (*padded, *kept) if _in_sight(row[1]) or _in_sight(row[2])),
            ("arguments", self.ours.argument_bytes, self.theirs.argument_bytes, megabytes),
            ("temporaries", self.ours.temp_bytes, self.theirs.temp_bytes, megabytes),
            ("kernels", a.kernels, b.kernels, str),
            ("time of products", a.product_seconds, b.product_seconds, seconds_text),
        )
        return [(name, text(one), text(other), ratio_text(one, other)) for name, one, other, text in found]

    def _totals(self) -> list[str]:
        rows = [("", "tpuflow", "XLA:TPU", "ratio"), *self.totals()]
        return [f"{name:20} {one:>14} {other:>14} {ratio:>7}" for name, one, other, ratio in rows]


def _counted(collectives: Iterable[Sent]) -> int:
    return sum(one.count for one in collectives)


def _sent_most(who: str, side: Side) -> list[str]:
    return [
        f"  {who}: {megabytes(one.sent_bytes):>12} {one.kind}, {one.beside_bytes / max(1, one.sent_bytes):.0%} beside computation  "
        f"{one.scope}  {Path(one.source).name}".rstrip()
        for one in largest(side.collectives, NAMED)
    ]


def _alike_as_one(rows: Sequence[LayerRow]) -> list[LayerRow]:
    """Rows of layers whose names differ in a number only (h_0, h_1) and that tpuflow compiles alike, merged into one row of h_*."""
    groups: dict[tuple[str, str, KernelCosts], list[LayerRow]] = {}
    for row in rows:
        groups.setdefault((_NUMBER.sub("_*", row.layer), row.phase, replace(total(row.ours), product_seconds=0.0)), []).append(row)
    found = [_as_one(name, group) if len(group) > 1 else group[0] for (name, _, _), group in groups.items()]
    return sorted(found, key=lambda row: -abs(row.difference))


def _as_one(name: str, rows: Sequence[LayerRow]) -> LayerRow:
    ours, theirs = (tuple(work for row in rows for work in getattr(row, side)) for side in ("ours", "theirs"))
    return LayerRow(f"{name} ({len(rows)} alike)", rows[0].phase, ours, theirs)


def _table(rows: Sequence[LayerRow]) -> list[str]:
    heading = f"{'layer':52} {'phase':8} {'MB ours':>10} {'theirs':>10} {'ratio':>6} {'kernels':>9} {'products':>23}"
    return [heading, *map(_row, rows)]


def _explained(rows: Sequence[LayerRow]) -> list[str]:
    lines: list[str] = []
    for row in rows:
        named = [f"  {who}: {size:>12}{aside}  {what}".rstrip() for who, size, aside, what in largest_of(row)]
        lines += [f"{row.layer}, {row.phase}: {explanation(row)}", *named]
    return lines


def explanation(row: LayerRow) -> str:
    """How much more or less we move in a layer than XLA:TPU, and what seems to be the cause."""
    sides = [(US, total(row.ours)), (THEM, total(row.theirs))]
    (more, most), (fewer, least) = sides if row.difference > 0 else sides[::-1]
    if not row.difference:
        return "as much as XLA:TPU"
    size = f"{megabytes(abs(row.difference))} {'more' if more == US else 'less'} than XLA:TPU"
    here, there = (sum(getattr(costs, name) for name in ON_CHIP) for costs in (most, least))
    if 2 * (there - here) >= abs(row.difference):
        return f"{size}; {fewer} reads and writes {megabytes(there - here)} more on the chip"
    if most.kernels > least.kernels > 0:
        return f"{size}; {more} has {most.kernels} kernels, {fewer} {least.kernels}, so that more goes between them through HBM"
    if not least.hbm_bytes:
        return f"{size}; {fewer} moves nothing here: what it reads came before, or stays on the chip, or is in another layer"
    return f"{size}; kernels of {more} read more of it again, or hold it in wider types"


def largest_of(row: LayerRow) -> list[tuple[str, str, str, str]]:
    """The largest of either side's work in HBM: whose, its size, what it keeps or moves on the side, and what it is."""
    return [(who, *one) for who, work in ((US, row.ours), (THEM, row.theirs)) for one in _named(work)]


def _row(row: LayerRow) -> str:
    a, b = total(row.ours), total(row.theirs)
    products = f"{seconds_text(a.product_seconds)} / {seconds_text(b.product_seconds)}" if a.product_seconds or b.product_seconds else "-"
    layer = row.layer if len(row.layer) <= 52 else f"...{row.layer[-49:]}"
    numbers = f"{a.hbm_bytes / 1e6:10.2f} {b.hbm_bytes / 1e6:10.2f} {ratio_text(a.hbm_bytes, b.hbm_bytes):>6}"
    return f"{layer:52} {row.phase:8} {numbers} {f'{a.kernels}/{b.kernels}':>9} {products:>23}"


def _named(work: Sequence[Work]) -> list[tuple[str, str, str]]:
    largest = sorted((one for one in work if one.costs.hbm_bytes), key=lambda one: -one.costs.hbm_bytes)[:NAMED]
    return [(megabytes(one.costs.hbm_bytes), _aside(one.costs), f"{one.what}  {Path(one.source).name}".rstrip()) for one in largest]


def _aside(costs: KernelCosts) -> str:
    if costs.prefetched_bytes:
        return " moved while others run"
    kept = [(getattr(costs, name), memory) for name, (memory, _) in BESIDE_HBM.items()]
    return "".join(f" and {megabytes(size)} in {memory}" for size, memory in kept if _in_sight(size))


def _in_sight(count: int) -> bool:
    """Whether so many bytes are more than 0.00 MB."""
    return megabytes(count) != megabytes(0)


def megabytes(count: float) -> str:
    """Bytes in MB."""
    return f"{count / 1e6:.2f} MB"


def ratio_text(one: float, other: float) -> str:
    """One over the other."""
    if not other:
        return "-"
    return f"{one / other:.2f}" if one < FAR * other else f">{FAR}"
