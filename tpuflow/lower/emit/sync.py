"""Semaphores for a recorded kernel: which queue waits for which, derived from who writes and who reads each tile.

A tile written by queue P and read by another queue C gets two semaphores: `ready` (P signals after its last write, C waits before
its first read) and `free` (it starts at the number of slots; P waits before its first write, C signals after its last read).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tpuflow.isa.dma import Signal, Wait
from tpuflow.isa.instruction import Instruction, Tile
from tpuflow.isa.program import SECTIONS

Code = Mapping[str, Sequence[Instruction]]


class Place(NamedTuple):
    """An instruction's place: its section's number and its position there. A NamedTuple because places are compared very often."""

    section: int
    position: int

    @property
    def in_body(self) -> bool:
        """Whether it runs every step."""
        return SECTIONS[self.section] == "body"


@dataclass(slots=True)
class Uses:
    """Where a tile is written and read: places by queue, in program order."""

    writes: dict[str, list[Place]] = field(default_factory=lambda: defaultdict(list))
    reads: dict[str, list[Place]] = field(default_factory=lambda: defaultdict(list))

    @property
    def writer(self) -> str:
        """The one queue that writes the tile."""
        (queue,) = self.writes
        return queue

    @property
    def consumers(self) -> tuple[str, ...]:
        """The other queues that read it."""
        return tuple(q for q in self.reads if q != self.writer)

    @property
    def places(self) -> list[Place]:
        """All accesses in program order."""
        return sorted(self._all())

    @property
    def sections(self) -> set[int]:
        """The sections it is used in."""
        return {p.section for p in self._all()}

    def _all(self) -> list[Place]:
        return [p for by_queue in (self.writes, self.reads) for places in by_queue.values() for p in places]


def each_instruction(code: Code) -> Iterator[tuple[Place, Instruction]]:
    """Every instruction with its place, in program order."""
    for section, name in enumerate(SECTIONS):
        for index, instruction in enumerate(code[name]):
            yield Place(section, index), instruction


def tile_uses(code: Code) -> dict[Tile, Uses]:
    """The uses of every tile, in order of first appearance."""
    found: dict[Tile, Uses] = defaultdict(Uses)
    for place, instruction in each_instruction(code):
        for tile in instruction.reads():
            found[tile].reads[instruction.queue].append(place)
        for tile in instruction.writes():
            found[tile].writes[instruction.queue].append(place)
    return dict(found)


@dataclass(slots=True)
class Synchronizer:
    """Waits and signals to insert into a kernel, and the initial counts of its semaphores."""

    code: Code
    semaphores: list[int] = field(default_factory=list)
    before: dict[Place, list[Instruction]] = field(default_factory=lambda: defaultdict(list))
    after: dict[Place, list[Instruction]] = field(default_factory=lambda: defaultdict(list))

    def order_tile(self, uses: Uses, slots: int, *, reused: bool) -> None:
        """Order the writer of a tile and each of its consumers. reused: slots are filled again, so the writer must wait for free ones."""
        for consumer in uses.consumers:
            self._hand_over(uses.writer, consumer, uses.writes[uses.writer], uses.reads[consumer], slots, reused=reused)

    def order_buffers(self, shared: Mapping[int, int]) -> None:
        """A buffer read and written by one kernel (in place): its store waits for its load. shared: buffers that may be one with others."""
        loads: dict[int, tuple[str, Place]] = {}
        for place, instruction in each_instruction(self.code):
            for role, window in instruction.windows():
                buffer = shared.get(window.buffer, window.buffer)
                if role == "read":
                    loads[buffer] = instruction.queue, place
                elif buffer in loads and loads[buffer][0] != instruction.queue:
                    self._order_store(*loads[buffer], instruction.queue, place)

    def _order_store(self, loader: str, loaded: Place, storer: str, stored: Place) -> None:
        assert loaded.section == stored.section, "an in-place update loads and stores in one section"
        self._signal(loader, storer, loaded, stored, 0)

    def _hand_over(self, writer: str, reader: str, writes: list[Place], reads: list[Place], slots: int, *, reused: bool) -> None:
        if all(p.in_body for p in (*writes, *reads)):
            written, first_read, last_read, first_write = writes[-1], reads[0], reads[-1], writes[0]
            self._signal(writer, reader, written, first_read, 0)
            if reused:
                self._signal(reader, writer, last_read, first_write, slots)
            return
        self._hand_over_per_point(writer, reader, writes, reads, slots, reused=reused)

    def _hand_over_per_point(self, writer: str, reader: str, writes: list[Place], reads: list[Place], slots: int, *, reused: bool) -> None:
        """Order uses once per grid point. A last use in the body is signalled in the epilogue, a first one awaited in the prologue."""
        assert not writes[0].in_body, "a tile that lives across sections is first written in the prologue or the epilogue"
        ready = self._new(0)
        if reads[0].in_body:
            assert not writes[-1].in_body, "a tile that the body hands over cannot be carried by it"
            self.after[writes[-1]].append(Signal(writer, ready))
            self.before[self._end("prologue")].append(Wait(reader, ready))
        else:
            self._put(Signal(writer, ready), writes[-1], self.after)
            self.before[reads[0]].append(Wait(reader, ready))
        if reused:
            free = self._new(slots)
            self.before[writes[0]].append(Wait(writer, free))
            self._put(Signal(reader, free), reads[-1], self.after)

    def _put(self, instruction: Instruction, place: Place, where: dict[Place, list[Instruction]]) -> None:
        """At its place, or at the start of the epilogue if that is in the body."""
        if place.in_body:
            self.before[Place(SECTIONS.index("epilogue"), 0)].append(instruction)
        else:
            where[place].append(instruction)

    def _signal(self, sender: str, receiver: str, after: Place, before: Place, initial: int) -> None:
        semaphore = self._new(initial)
        self.after[after].append(Signal(sender, semaphore))
        self.before[before].append(Wait(receiver, semaphore))

    def _end(self, section: str) -> Place:
        return Place(SECTIONS.index(section), len(self.code[section]))

    def _new(self, initial: int) -> int:
        self.semaphores.append(initial)
        return len(self.semaphores) - 1

    def render(self, section: str, finish: Callable[[Instruction], Instruction]) -> Iterator[tuple[Instruction, int]]:
        """The section with its waits and signals, each with the index of the recorded instruction it belongs to."""
        number, count = SECTIONS.index(section), len(self.code[section])
        for index in range(count + 1):
            place, owner = Place(number, index), min(index, count - 1)
            yield from ((i, owner) for i in self.before.get(place, ()))
            if index < count:
                yield finish(self.code[section][index]), index
            yield from ((i, owner) for i in self.after.get(place, ()))
