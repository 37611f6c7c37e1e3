"""What may be spent on a Program before it runs, in proportion to its size."""

from __future__ import annotations

from dataclasses import dataclass

from tpuflow.isa.refusal import Refusal

VISITS, VISITS_AN_INSTRUCTION = 2**19, 64
SHAPES, SHAPES_AN_INSTRUCTION = 2**13, 16


@dataclass(slots=True)
class VerifyBudget:
    """What is left for the kernels of a Program that are not yet checked.

    Visits of cells of on-chip memory, on the walk that shows a kernel's order: what the compiler makes takes about 5 an instruction, but a
    kernel of many slots, or of tiles over many others, could take millions. Shapes of instructions: those of a body are translated once for
    each of the shapes that clipped tiles can have, of which the compiler's have two or four.
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
    """What is spent of a limit with so many more."""
    if before + count > limit:
        raise Refusal(f"{what}, with {limit - before} of {limit} left for this program; expected {expected}")
    return before + count
