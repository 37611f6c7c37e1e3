"""The budget of the verifier: a limit on the cost of checking a Program, in proportion to its size."""

from __future__ import annotations

from dataclasses import dataclass

from tpuflow.isa.refusal import Refusal

VISITS, VISITS_AN_INSTRUCTION = 2**19, 64
SHAPES, SHAPES_AN_INSTRUCTION = 2**13, 16


@dataclass(slots=True)
class VerifyBudget:
    """The cost spent so far on the kernels of a Program with so many `instructions`.

    `visits`: of cells of on-chip memory, in the walk that proves a kernel's order (`verify.order`). Compiled kernels take about 5 for each
    instruction, but one with many slots, or with tiles that overlap many others, could take millions. `shapes`: of instructions; a body is
    translated once for each combination of clipped tiles, of which compiled kernels have two or four.
    """

    instructions: int
    visits: int = 0
    shapes: int = 0

    def visit(self, count: int) -> None:
        """Refuse a walk that takes too many visits."""
        what = f"checking the order of its accesses takes {count} visits of on-chip memory"
        limit = VISITS + VISITS_AN_INSTRUCTION * self.instructions
        self.visits = _spent(self.visits, count, limit, what, "fewer slots, or tiles that lie over fewer others")

    def shape(self, count: int) -> None:
        """Refuse instructions that come in too many shapes."""
        what = f"its instructions, in all the shapes that clipped tiles give them, are {count}"
        limit = SHAPES + SHAPES_AN_INSTRUCTION * self.instructions
        self.shapes = _spent(self.shapes, count, limit, what, "tiles that divide more of their axes")


def _spent(before: int, count: int, limit: int, what: str, expected: str) -> int:
    """The new cost after spending `count` more; refused beyond `limit`."""
    if before + count > limit:
        raise Refusal(f"{what}, with {limit - before} of {limit} left for this program; expected {expected}")
    return before + count
