"""Where an operand of a product has elements, and what products that take part in a sum come to if some are infinite or NaN."""

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
        """Whether it holds wherever labels of these lengths (at least 1) may stand."""
        low, high = self.range(sizes)
        moving = (factor for label, factor in self.terms if sizes[label] > 1)
        whole = all(n % self.dilation == 0 for n in (self.origin, *moving))
        return whole and low >= 0 and high < self.extent * self.dilation

    def range(self, sizes: Mapping[int, int]) -> tuple[int, int]:
        """The lowest and the highest sum, before the division."""
        ends = [factor * (sizes[label] - 1) for label, factor in self.terms]
        return self.origin + sum(min(0, e) for e in ends), self.origin + sum(max(0, e) for e in ends)

    def from_the_end(self, lengths: Mapping[int, int]) -> Bound:
        """The same, with the positions of labels of the given lengths counted from the other end."""
        origin = self.origin + sum(factor * (lengths[x] - 1) for x, factor in self.terms if x in lengths)
        return replace(self, origin=origin, terms=tuple((x, -factor if x in lengths else factor) for x, factor in self.terms))

    def holds(self, place: Any) -> Any:
        """Whether there are elements, given the sums before the division (of NumPy or jax)."""
        inside = (place >= 0) & (place < self.extent * self.dilation)
        return inside if self.dilation == 1 else inside & (place % self.dilation == 0)


ZERO, FINITE, INFINITE, NAN = range(4)
"""How large a factor is; a zero may also be one that takes part in no product."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of sizes `least` to `most`; of one sign only if it is 1 or -1."""

    least: int
    most: int
    sign: int = 0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Factors of a that make `product`, infinite or NaN, of factors of b."""

    a: Factors
    b: Factors
    product: float


def _signed(a: tuple[int, int], b: tuple[int, int]) -> list[Meeting]:
    """Factors of these sizes: infinity where the signs are equal, else its negative."""
    signs = ((1, 1), (-1, -1), (1, -1), (-1, 1))
    return [Meeting(Factors(*a, x), Factors(*b, y), x * y * math.inf) for x, y in signs]


MEETINGS = (
    *_signed((FINITE, INFINITE), (INFINITE, INFINITE)),
    *_signed((INFINITE, INFINITE), (FINITE, FINITE)),
    Meeting(Factors(ZERO, ZERO), Factors(INFINITE, INFINITE), math.nan),
    Meeting(Factors(INFINITE, INFINITE), Factors(ZERO, ZERO), math.nan),
    Meeting(Factors(NAN, NAN), Factors(ZERO, NAN), math.nan),
    Meeting(Factors(ZERO, INFINITE), Factors(NAN, NAN), math.nan),
)
"""Every way in which two factors make a product that is not finite. The products of a sum that are not finite add up to what it is."""
