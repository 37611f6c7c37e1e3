"""The figures that are measured of an array: counts and magnitudes, found from the bits of its elements.

All of it is integer arithmetic on the host, so that measuring itself cannot round, flush to zero or overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

NO_MAGNITUDE = 2**31 - 1
"""The smallest magnitude of an array without finite numbers other than zero."""


class Format(NamedTuple):
    """A floating-point type as integers of its width: the bits of all but the sign, of the smallest normal number, and of infinity."""

    integer: Any
    mask: int
    normal: int
    infinity: int

    @property
    def unsigned(self) -> Any:
        """Integers of its width without a sign."""
        return np.dtype(f"uint{8 * self.integer.itemsize}")


def _format(dtype: Any) -> Format:
    kind = jnp.finfo(dtype)
    mask = 2 ** (kind.bits - 1) - 1
    return Format(np.dtype(f"int{kind.bits}"), mask, 1 << kind.nmant, mask >> kind.nmant << kind.nmant)


FORMATS = {name: _format(name) for name in ("float16", "bfloat16", "float32")}
Mask = Callable[[], Any]
"""Gives booleans that line up with an array, when they are needed."""


class Counts(NamedTuple):
    """The figures of one array (with a leading axis of trips for one inside a loop).

    `underflow`: zeros whose exact value is not zero, but too small for the type. `born`: elements that are not finite although the operands
    were. `largest`, `smallest`: bits of the magnitudes of finite elements other than zero. `census`: the number of finite magnitudes
    strictly above each threshold, along a last axis; None without thresholds.
    """

    elements: Any
    inf: Any
    nan: Any
    zero: Any
    subnormal: Any
    underflow: Any
    born: Any
    largest: Any
    smallest: Any
    census: Any

    @property
    def nonfinite(self) -> Any:
        """Infinities and NaNs."""
        return self.inf + self.nan


def format_of(x: Any) -> Format:
    """The format of a floating array."""
    return FORMATS[str(x.dtype)]


def bits_of(x: Any) -> Any:
    """The bits of a floating array."""
    return np.asarray(x).view(format_of(x).integer)


def magnitude(x: Any) -> Any:
    """The bits of |x|: ordered as the magnitudes are, infinity and NaN on top."""
    kind = format_of(x)
    return bits_of(x) & kind.integer.type(kind.mask)


def is_zero(x: Any) -> Any:
    """Whether elements are +0 or -0; subnormals are not, even where the device's arithmetic reads them as zero."""
    return magnitude(x) == 0


def is_nonfinite(x: Any) -> Any:
    """Whether elements are infinite or NaN."""
    return magnitude(x) >= format_of(x).infinity


def tally(x: Any, nonzero: Mask | None = None, finite: Mask | None = None, thresholds: Sequence[int] = ()) -> Counts:
    """The figures of an array.

    nonzero: where it ought not to be zero. finite: where it was computed from finite numbers. Both are asked only if it matters.
    thresholds: of the census, as bits.
    """
    kind, m = format_of(x), magnitude(x)
    zeros, bad = m == 0, m >= kind.infinity
    zero, nonfinite = np.count_nonzero(zeros), np.count_nonzero(bad)
    inf = np.count_nonzero(m == kind.infinity) if nonfinite else 0
    # less one, zero is the largest of the unsigned numbers
    smallest = int(np.min((m - kind.integer.type(1)).view(kind.unsigned), initial=kind.infinity)) + 1
    return Counts(
        elements=m.size,
        inf=inf,
        nan=nonfinite - inf,
        zero=zero,
        subnormal=np.count_nonzero(m < kind.normal) - zero,
        underflow=np.count_nonzero(zeros & nonzero()) if zero and nonzero is not None else 0,
        born=np.count_nonzero(bad & finite()) if nonfinite and finite is not None else 0,
        largest=int(np.max(np.where(bad, kind.integer.type(0), m) if nonfinite else m, initial=0)),
        smallest=smallest if smallest < kind.infinity else NO_MAGNITUDE,
        census=_census(m[~bad], thresholds) if thresholds else None,
    )


def empty_counts(thresholds: Sequence[int] = ()) -> Counts:
    """The figures of an array without elements, for an operation that did not run."""
    return tally(np.empty(0, np.float32), thresholds=thresholds)


def stacked(trips: Sequence[Counts]) -> Counts:
    """The figures of an operation, a row for each time that it ran."""
    return Counts(*(None if column[0] is None else np.stack(column) for column in zip(*trips, strict=True)))


def _census(m: Any, thresholds: Sequence[int]) -> Any:
    """How many magnitudes lie strictly above each threshold, [T]."""
    order = np.argsort(thresholds)
    below = np.searchsorted(np.asarray(thresholds)[order].astype(m.dtype), m)  # thresholds strictly below each magnitude
    exactly = np.bincount(below, minlength=len(order) + 1)
    above = np.empty(len(order), np.int64)
    above[order] = np.cumsum(exactly[::-1])[::-1][1:]
    return above


def number(bits: int, dtype: str) -> float:
    """The magnitude whose bits these are."""
    return float(np.asarray(bits, np.int64).astype(FORMATS[dtype].integer).view(jnp.dtype(dtype)))


def bits_of_number(value: float, dtype: str) -> int:
    """The bits of a magnitude, rounded to the type."""
    return int(np.asarray(value).astype(jnp.dtype(dtype)).view(FORMATS[dtype].integer))
