"""Softmaxes of f32, natively: their maxima need not hand on NaN.

XLA:CPU gives a whole softmax to YNNPACK, which goes over memory once and leaves nothing to compile, if its maximum is one of floats. That
loses NaN in YNNPACK, and nobody sees it if the maximum is only subtracted from its own row, and of what comes of that only what the sum of
the row's exponentials divides, or its logarithm is taken from, is used: the sum is NaN if an element is, and so is then the whole row.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence

from tpuflow.device.fast.extremes import Makers, handed_on, is_number
from tpuflow.dtypes import BF16, F32
from tpuflow.isa import dma, matrix, vector
from tpuflow.isa.instruction import Instruction, Tile

Readers = Callable[[Instruction], Sequence[Instruction]]


class Role(enum.Enum):
    """What an instruction of a softmax does: the maximum of rows; the sum of rows."""

    MAXIMUM = enum.auto()
    SUM = enum.auto()


ARITHMETIC = frozenset({"add", "sub", "mul", "div"})
"""What is NaN if an operand is, and is YNNPACK's as it is XLA's."""
MOST_MAKERS = 64
"""How many instructions are looked through."""


def softmaxes(instructions: Sequence[Instruction], readers: Readers, makers: Makers) -> Mapping[int, Role]:
    """The roles of a kernel's instructions in its softmaxes, by `id`."""
    found: dict[int, Role] = {}
    for i in instructions:
        if isinstance(i, vector.ReduceInto) and i.op == "max" and i.a.dtype == F32 and i.axes == (len(i.a.axes) - 1,):
            found |= _Softmax(i, readers, makers).roles() or {}
    return found


class _Softmax:
    """What comes of a maximum of rows."""

    def __init__(self, maximum: vector.ReduceInto, readers: Readers, makers: Makers):
        self._maximum, self._readers, self._makers = maximum, readers, makers
        self._roles: dict[int, Role] = {id(maximum): Role.MAXIMUM}

    def roles(self) -> Mapping[int, Role] | None:
        """The roles of its instructions; None if a NaN that the maximum lost could be seen, or YNNPACK would not take all of it."""
        differences = self._differences() if self._starts_at(self._maximum, -math.inf) and self._is_plain() else None
        if differences is None:
            return None
        of_differences = [r for d in differences for r in self._readers(d)]
        exponentials = [r for r in of_differences if isinstance(r, vector.Unary) and r.op == "exp"]
        of_exponentials = [r for e in exponentials for r in self._readers(e)]
        sums = {id(r): Role.SUM for r in of_exponentials if self._sums(r)}
        self._roles |= sums
        known = {*sums, *map(id, exponentials)}
        others = [r for r in (*of_differences, *of_exponentials) if id(r) not in known]
        return self._roles if sums and all(map(self._is_nan_with_sum, others)) else None

    def _differences(self) -> list[Instruction] | None:
        """The row less its maximum; None if the maximum is read by anything else."""
        found: list[Instruction] = []
        made: list[Instruction] = [self._maximum]
        for maker in made:
            (own,) = maker.writes()
            for r in self._readers(maker):
                if self._is_difference(r, own):
                    found.append(r)
                    continue
                if handed_on(r, self._makers) != own and not _stretches_rows(r):
                    return None
                made.append(r)
        return found

    def _is_difference(self, i: Instruction, subtracted: Tile) -> bool:
        row = self._maximum.a
        of_row = isinstance(i, vector.Binary) and i.op == "sub" and i.b == subtracted and i.a == row
        return of_row and [*map(id, self._makers(i, row))] == [*map(id, self._makers(self._maximum, row))]

    def _sums(self, i: Instruction) -> bool:
        return isinstance(i, vector.ReduceInto) and i.op == "add" and i.axes == self._maximum.axes and self._starts_at(i, 0.0)

    def _is_nan_with_sum(self, i: Instruction) -> bool:
        return isinstance(i, vector.Binary) and i.op in ARITHMETIC and any(self._is_of_sum(i, tile) for tile in i.reads())

    def _is_of_sum(self, reader: Instruction, tile: Tile) -> bool:
        """Whether what is in a tile is the row's sum, or its logarithm."""

        def has_sum(maker: Instruction) -> bool:
            hands_on = _stretches_rows(maker) or (isinstance(maker, vector.Unary) and maker.op == "log")
            return self._roles.get(id(maker)) is Role.SUM or (hands_on and self._is_of_sum(maker, *maker.reads()))

        makers = self._makers(reader, tile)
        return bool(makers) and all(map(has_sum, makers))

    def _starts_at(self, i: vector.ReduceInto, number: float) -> bool:
        return is_number(self._makers(i, i.acc), number)

    def _is_plain(self) -> bool:
        """Whether a row is loaded, or made by operations that YNNPACK takes with the softmax: what is selected is written first, and
        softmaxes of that take 1.14 times the time."""
        looked_at: list[Instruction] = [*self._makers(self._maximum, self._maximum.a)]
        for i in looked_at:
            if len(looked_at) > MOST_MAKERS:
                return False
            if isinstance(i, _LEAVES):
                continue
            computes = isinstance(i, vector.Binary) and i.op in ARITHMETIC and i.a.dtype == F32
            if not (computes or isinstance(i, vector.Broadcast) or (isinstance(i, vector.Convert) and i.a.dtype == BF16)):
                return False
            looked_at += [m for tile in i.reads() for m in self._makers(i, tile) if all(m is not x for x in looked_at)]
        return True


def _stretches_rows(i: Instruction) -> bool:
    """Whether an instruction broadcasts numbers of rows along their own rows, none along another's."""
    return isinstance(i, vector.Broadcast) and i.axes == tuple(range(len(i.a.axes)))


_LEAVES = (dma.Load, vector.Constant, matrix.MatmulAccumulate)
