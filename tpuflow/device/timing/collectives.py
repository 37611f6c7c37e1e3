"""The time of collectives: closed forms over the chip's links, while kernels run. The link queue sends one after the other; while what one
has sent is on its way from hop to hop, the next is sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from tpuflow.chips.links import collective_seconds, sending_seconds
from tpuflow.device.timing.prices import PICOSECONDS, picoseconds
from tpuflow.isa.collectives import KINDS, Collective, farthest, sizes_of
from tpuflow.isa.program import Program


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """A collective at its place in the Program, executed `count` times: what each chip sends, how long that takes until it has arrived, for
    how much of that it has the links to itself, and how much of it the chip waits for, with nothing left to do."""

    place: str
    count: int
    kind: str
    axes: tuple[str, ...]
    scope: str
    source: str
    sent_bytes: int
    picoseconds: int
    sending_picoseconds: int
    exposed_picoseconds: int

    @property
    def seconds(self) -> float:
        """Of all executions."""
        return self.count * self.picoseconds / PICOSECONDS

    @property
    def sending_seconds(self) -> float:
        """Of all executions."""
        return self.count * self.sending_picoseconds / PICOSECONDS

    @property
    def exposed_seconds(self) -> float:
        """Of all executions."""
        return self.count * self.exposed_picoseconds / PICOSECONDS


def collective_row(program: Program, c: Collective, place: str, count: int) -> CollectiveRow:
    """One collective by itself.

    Raises:
      ConfigError: the chip's row does not say how so many chips are joined.
    """
    source, sizes = program.buffers[c.source], [axis.size for axis in program.mesh]
    joined = [axis.joined for axis in program.mesh]
    group = sizes_of(program.mesh, c.axes)
    chips = 1
    for size in group:
        chips *= size
    distance = farthest(c.pairs, chips)
    way = (program.chip, c.kind, source.bytes, sizes, c.axes, distance, joined)
    took, sending = (picoseconds(form(*way)) for form in (collective_seconds, sending_seconds))
    sent = KINDS[c.kind].sent_elems(source.elems, chips) * source.dtype.bytes
    names = tuple(program.mesh[a].name for a in c.axes)
    return CollectiveRow(place, count, c.kind, names, c.scope, c.where, sent, took, sending, 0)


@dataclass(slots=True)
class LinkQueue:
    """What is on its way in one list of blocks, in time since its begin: the link queue sends one collective after the other."""

    free: int = 0
    arrivals: dict[int, tuple[CollectiveRow, int]] = field(default_factory=dict)

    def start(self, semaphore: int, row: CollectiveRow, now: int) -> tuple[int, int]:
        """Begin and end of what a collective sends."""
        begin = max(now, self.free)
        self.free = begin + row.sending_picoseconds
        self.arrivals[semaphore] = row, begin + row.picoseconds
        return begin, self.free

    def wait(self, semaphore: int, now: int) -> tuple[CollectiveRow, int]:
        """The collective, and for how long it is still waited for."""
        row, end = self.arrivals.pop(semaphore)
        return row, max(0, end - now)
