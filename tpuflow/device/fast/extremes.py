"""Maxima with -infinity and minima with infinity, which natively are their other operand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tpuflow.isa import vector
from tpuflow.isa.instruction import Instruction, Tile

Makers = Callable[[Instruction, Tile], Sequence[Instruction]]
"""(an instruction, a tile that it reads) -> the instructions whose writes of it it may find there."""
NOTHING = {"max": -math.inf, "min": math.inf}
"""The identities of extremes of floats."""


def is_number(makers: Sequence[Instruction], number: float) -> bool:
    """Whether these write a float number everywhere; zeros of either sign differ."""
    return bool(makers) and all(isinstance(maker, vector.Constant) and str(float(maker.value)) == str(number) for maker in makers)


def handed_on(i: Instruction, makers: Makers) -> Tile | None:
    """The operand that an extreme with its identity is; None if an instruction is none."""
    if not isinstance(i, vector.Binary) or i.op not in NOTHING:
        return None
    return next((other for tile, other in ((i.a, i.b), (i.b, i.a)) if is_number(makers(i, tile), NOTHING[i.op])), None)
