"""Affine accesses of a kernel: which element of an operand each point of the iteration space reads or writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tpuflow.isa.bounds import Bound


@dataclass(frozen=True, slots=True)
class AccessAxis:
    """The position along one axis of an operand, an affine function `bound` of the iteration space's axes; outside of its extent there is
    no element. `start`: an operand whose value at the point is added to the position (a dynamic start, an index); None for static
    accesses.
    """

    bound: Bound
    start: int | None = None

    def walks(self, sizes: Sequence[int]) -> int | None:
        """The axis of the iteration space that traverses this one completely and in order; None if there is none."""
        axis = self.bound.terms[0][0] if self.bound.terms else -1
        plain = self.start is None and 0 <= axis < len(sizes) and self.bound == Bound(sizes[axis], ((axis, 1),))
        return axis if plain else None

    def text(self, operands: Sequence[str], sizes: Sequence[int]) -> str:
        """x0, or 224 at (-1 + 2*x1)/1, or 128 at (0 + 1*x0)/1 from %1."""
        walked = self.walks(sizes)
        start = "" if self.start is None else f" from {operands[self.start]}"
        return f"{self.bound}{start}" if walked is None else f"x{walked}"


@dataclass(frozen=True, slots=True)
class Access:
    """An access to operand number `operand` (a node's inputs, then its results), viewed as a dense row-major array with `axes`."""

    operand: int
    axes: tuple[AccessAxis, ...]

    def numbered(self, operand: int, number: Callable[[int], int]) -> Access:
        """The same access to another operand; `number` renumbers the operands of dynamic starts."""
        axes = (a if a.start is None else replace(a, start=number(a.start)) for a in self.axes)
        return Access(operand, tuple(axes))

    def text(self, operands: Sequence[str], sizes: Sequence[int]) -> str:
        """%0[x0, 224 at (-1 + 2*x1 + 1*x3)/1], by the names of operands; x0 is an axis of the space over a whole one."""
        return f"{operands[self.operand]}[{', '.join(axis.text(operands, sizes) for axis in self.axes)}]"

    def problem(self, sizes: Sequence[int], elems: Sequence[int]) -> str:
        """What is wrong with the access in a kernel with axes of `sizes` and operands of `elems` elements; empty if nothing is."""
        inside = 1
        for axis in self.axes:
            inside *= axis.bound.extent
            walked = [a for a, _ in axis.bound.terms]
            if any(not 0 <= a < len(sizes) for a in walked):
                return f"its axes are x0 to x{len(sizes) - 1}, found {axis.bound}"
            low, high = axis.bound.range(dict(enumerate(sizes)))
            if axis.start is None and 0 not in sizes and (high < 0 or low >= axis.bound.extent * axis.bound.dilation):
                return f"no point is at an element of the axis {axis.bound}"
        if inside != elems[self.operand]:
            return f"its axes have {inside} elements in all, the operand {elems[self.operand]}"
        return ""
