"""Bounds of a product's operands, outside which they are padding, and the table of products that are infinite or NaN.

The matrix unit reads padding as zeros that take part in no product. The NumPy and the lax arithmetic leave them out by masks made of the
bounds (`Contraction.lhs_mask`), and use the table where such a zero may have met an infinity or a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Bound:
    """An operand has elements only where (origin + sum of factor * position) / dilation is whole and in [0, extent).

    `terms` are (label, factor); a position counts along the label's whole axis (tile index * tile size + j), so one bound serves the
    tiles of all grid indices. Elsewhere lies padding. A zero that the matrix unit reads there takes part in no product: without the
    bound, an infinite or NaN factor of the other operand would make a NaN of it.
    """

    extent: int
    terms: tuple[tuple[int, int], ...]
    origin: int = 0
    dilation: int = 1

    def __str__(self) -> str:
        place = " + ".join((str(self.origin), *(f"{factor}*x{label}" for label, factor in self.terms)))
        return f"{self.extent} at ({place})/{self.dilation}"

    def always(self, sizes: Mapping[int, int]) -> bool:
        """Whether there are elements at all positions of labels of these lengths (at least 1)."""
        low, high = self.range(sizes)
        moving = (factor for label, factor in self.terms if sizes[label] > 1)
        whole = all(n % self.dilation == 0 for n in (self.origin, *moving))
        return whole and low >= 0 and high < self.extent * self.dilation

    def range(self, sizes: Mapping[int, int]) -> tuple[int, int]:
        """The lowest and the highest sum, before the division."""
        ends = [factor * (sizes[label] - 1) for label, factor in self.terms]
        return self.origin + sum(min(0, e) for e in ends), self.origin + sum(max(0, e) for e in ends)

    def from_the_end(self, lengths: Mapping[int, int]) -> Bound:
        """The same bound of reversed axes: positions of the labels in `lengths` count from the other end."""
        origin = self.origin + sum(factor * (lengths[x] - 1) for x, factor in self.terms if x in lengths)
        return replace(self, origin=origin, terms=tuple((x, -factor if x in lengths else factor) for x, factor in self.terms))

    def holds(self, place: Any) -> Any:
        """Whether there are elements, given the sums before the division (of NumPy or jax)."""
        inside = (place >= 0) & (place < self.extent * self.dilation)
        return inside if self.dilation == 1 else inside & (place % self.dilation == 0)


ZERO, FINITE, INFINITE, NAN = range(4)
"""Floating-point classes of a factor, by magnitude. FINITE is any finite number but zero."""


@dataclass(frozen=True, slots=True)
class ClassRange:
    """The factors of the classes `least` to `most`, of either sign if `sign` is 0, else of that sign (1 or -1)."""

    least: int
    most: int
    sign: int = 0


@dataclass(frozen=True, slots=True)
class NonFiniteProduct:
    """A factor of `a` times a factor of `b` is `product`: an infinity or NaN."""

    a: ClassRange
    b: ClassRange
    product: float


def _infinities(a: tuple[int, int], b: tuple[int, int]) -> list[NonFiniteProduct]:
    """The products of factors of these classes, (least, most): infinity where the signs are equal, else minus infinity."""
    signs = ((1, 1), (-1, -1), (1, -1), (-1, 1))
    return [NonFiniteProduct(ClassRange(*a, x), ClassRange(*b, y), x * y * math.inf) for x, y in signs]


NON_FINITE_PRODUCTS = (
    *_infinities((FINITE, INFINITE), (INFINITE, INFINITE)),
    *_infinities((INFINITE, INFINITE), (FINITE, FINITE)),
    NonFiniteProduct(ClassRange(ZERO, ZERO), ClassRange(INFINITE, INFINITE), math.nan),
    NonFiniteProduct(ClassRange(INFINITE, INFINITE), ClassRange(ZERO, ZERO), math.nan),
    NonFiniteProduct(ClassRange(NAN, NAN), ClassRange(ZERO, NAN), math.nan),
    NonFiniteProduct(ClassRange(ZERO, INFINITE), ClassRange(NAN, NAN), math.nan),
)
"""All products of two factors that are not finite, each once. A sum with such terms is what these terms alone add up to."""
