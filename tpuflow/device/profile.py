"""The tier in which the fast engine translated each kernel: one row for each kernel, in program order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tpuflow.isa.program import Kernel, Program, walk

TIER_NAMES = {0: "not translated yet", 1: "lift", 2: "batch", 3: "loop"}


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel: its place in the program, its title, first source line, grid, number of instructions, tier (1 lift, 2 batch, 3 loop)."""

    place: str
    name: str
    source: str
    grid: tuple[int, ...]
    instructions: int
    tier: int


def profile(program: Program, tiers: Mapping[str, int]) -> tuple[KernelRow, ...]:
    """A row for every kernel; tier 0 where nothing has been translated."""
    return tuple(
        KernelRow(place, k.title, k.source, tuple(g.size for g in k.grid), len(k.instructions), tiers.get(place, 0))
        for place, k in walk(program.code)
        if isinstance(k, Kernel)
    )


def to_text(rows: tuple[KernelRow, ...]) -> str:
    """The rows as a table."""
    lines = [f"{'place':14} {'tier':7} {'instr':>5}  {'grid':16} kernel"]
    lines += [
        f"{r.place:14} {TIER_NAMES[r.tier]:7} {r.instructions:5}  {'x'.join(map(str, r.grid)) or '-':16} {r.name}  {r.source}" for r in rows
    ]
    return "\n".join(lines)
