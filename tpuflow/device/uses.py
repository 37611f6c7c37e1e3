"""What each instruction of a kernel touches, resolved once: queue, tiles, windows, semaphore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tpuflow.device.place import SECTIONS
from tpuflow.isa.instruction import Instruction, Tile, Window
from tpuflow.isa.program import Kernel


@dataclass(frozen=True, slots=True)
class Use:
    """One instruction: its number over all sections, and what it touches; `signals` and `waits` are semaphores (-1: none)."""

    number: int
    section: str
    instruction: Any
    queue: str
    reads: tuple[Tile, ...]
    writes: tuple[Tile, ...]
    windows: tuple[tuple[str, Window], ...]
    signals: int
    waits: int

    @property
    def is_indexed_store(self) -> bool:
        """A read-modify-write of rows."""
        return self.instruction.has("updates")


def uses(kernel: Kernel) -> list[Use]:
    """Every instruction of a kernel, in order."""
    sections = [(section, i) for section in SECTIONS for i in getattr(kernel, section)]
    return [_use(number, section, i) for number, (section, i) in enumerate(sections)]


def _use(number: int, section: str, i: Any) -> Use:
    if i.has("signals") or i.has("waits"):
        signals, waits = (i.semaphore, -1) if i.has("signals") else (-1, i.semaphore)
        return Use(number, section, i, i.queue, (), (), (), signals, waits)
    instruction: Instruction = i
    reads, writes, windows = tuple(instruction.reads()), tuple(instruction.writes()), tuple(instruction.windows())
    return Use(number, section, i, instruction.queue, reads, writes, windows, -1, -1)
