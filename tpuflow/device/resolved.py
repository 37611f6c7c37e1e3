"""A kernel's instructions resolved once, for all who walk over it: queue, tiles, windows, semaphore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpuflow.isa.instruction import QUEUES, Tile, Window
from tpuflow.isa.program import SECTIONS, Kernel

QUEUE_NUMBER = {name: i for i, name in enumerate(QUEUES)}


@dataclass(frozen=True, slots=True)
class Resolved:
    """One instruction: its number over all sections, its queue's number, and what it touches, tiles by their numbers in the kernel;
    `signals` and `waits` are semaphores."""

    number: int
    section: str
    instruction: Any
    queue: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    windows: tuple[tuple[str, Window], ...]
    signals: int | None = None
    waits: int | None = None

    @property
    def is_indexed_store(self) -> bool:
        """A read-modify-write of rows."""
        return self.instruction.has("updates")


@dataclass(frozen=True, slots=True)
class ResolvedKernel:
    """The tiles of a kernel, in order of first appearance, and its instructions in order."""

    tiles: tuple[Tile, ...]
    instructions: tuple[Resolved, ...]

    def by_section(self) -> Mapping[str, Sequence[Resolved]]:
        """The instructions of every section."""
        found: dict[str, list[Resolved]] = {name: [] for name in SECTIONS}
        for i in self.instructions:
            found[i.section].append(i)
        return found


def resolve(kernel: Kernel) -> ResolvedKernel:
    """Every instruction of a kernel."""
    numbers: dict[Tile, int] = {}
    sections = ((name, i) for name, section in kernel.sections for i in section)
    instructions = tuple(_resolved(number, name, i, numbers) for number, (name, i) in enumerate(sections))
    return ResolvedKernel(tuple(numbers), instructions)


def _resolved(number: int, section: str, i: Any, numbers: dict[Tile, int]) -> Resolved:
    queue = QUEUE_NUMBER[i.queue]
    if i.has("signals"):
        return Resolved(number, section, i, queue, (), (), (), signals=i.semaphore)
    if i.has("waits"):
        return Resolved(number, section, i, queue, (), (), (), waits=i.semaphore)
    reads, writes = (tuple([numbers.setdefault(t, len(numbers)) for t in tiles]) for tiles in (i.reads(), i.writes()))
    return Resolved(number, section, i, queue, reads, writes, tuple(i.windows()))
