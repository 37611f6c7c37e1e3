"""What is measured of an array: counts and magnitudes, from its bits.

Everything is integer arithmetic on the bits of the numbers, so that measuring rounds, flushes and overflows nothing itself. The device
makes a *code* of every array, int32 of its shape: the bits of the magnitude, or one of the marks below. Codes of large arrays are counted
on the device, those of small ones on the host, by the same function: hundreds of small reductions would take long to compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LARGE = 2**18
"""Elements (of all trips of a loop) from which on a code is counted on the device: a MiB."""
UNDERFLOW, BORN_INF, BORN_NAN = -1, -2, -3
"""Marks in a code: a zero that ought not to be one; an infinity, a NaN, that was computed from finite numbers."""
NOT_RUN = -4
"""Mark of a result that was not computed, since its branch was not taken."""
NO_MAGNITUDE = 2**31 - 1
"""The smallest magnitude of an array without finite numbers other than zero."""


class Format(NamedTuple):
    """A floating-point type as integers of its width: the bits of all but the sign, of the smallest normal number, and of infinity."""

    integer: Any
    mask: int
    normal: int
    infinity: int


def _format(dtype: Any) -> Format:
    kind = jnp.finfo(dtype)
    mask = 2 ** (kind.bits - 1) - 1
    return Format(np.dtype(f"int{kind.bits}"), mask, 1 << kind.nmant, mask >> kind.nmant << kind.nmant)


FORMATS = {name: _format(name) for name in ("float16", "bfloat16", "float32")}


class Counts(NamedTuple):
    """The figures of one array (with a leading axis of trips for one inside a loop), int32.

    `underflow`: results that are zero only because the type is too small. `born`: elements that are not finite although what they were
    computed from was. `largest`, `smallest`: bits of the magnitudes of finite numbers, zeros aside. `census`: how many finite magnitudes
    lie strictly above each of some thresholds, along a last axis.
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


def format_of(x: Any) -> Format:
    """The format of a floating array."""
    return FORMATS[str(x.dtype)]


def bits_of(x: Any) -> Any:
    """The bits of a floating array, on the device."""
    return jax.lax.bitcast_convert_type(x, format_of(x).integer)


def magnitude(x: Any) -> Any:
    """The bits of |x| as int32: ordered as the magnitudes are, infinity and NaN on top."""
    kind = format_of(x)
    return (bits_of(x) & kind.integer.type(kind.mask)).astype(jnp.int32)


def is_zero(x: Any) -> Any:
    """Whether elements are +0 or -0; subnormals are not, even where the device's arithmetic reads them as zero."""
    return magnitude(x) == 0


def is_bad(x: Any) -> Any:
    """Whether elements are infinite or NaN."""
    return magnitude(x) >= format_of(x).infinity


def encode(x: Any, nonzero: Any = None, finite: Any = None) -> Any:
    """The code of an array: `nonzero` tells where it ought not to be zero, `finite` where it was computed from finite numbers."""
    m, infinity = magnitude(x), format_of(x).infinity
    code = m if nonzero is None else jnp.where((m == 0) & nonzero, UNDERFLOW, m)
    if finite is None:
        return code
    return jnp.where((m >= infinity) & finite, jnp.where(m == infinity, BORN_INF, BORN_NAN), code)


def tally(code: Any, kind: Format, thresholds: Sequence[int] = (), kept_axes: int = 0, *, xp: Any = np) -> Counts:
    """The figures of a code; `thresholds` are bits, `kept_axes` the leading axes that are not counted over; `xp`: NumPy or jax.numpy."""
    code = code.reshape(*code.shape[:kept_axes], -1)
    finite = (code >= 0) & (code < kind.infinity)
    marks = xp.asarray(np.asarray(thresholds, np.int32))  # [T]; the census counts [..., T, elements] over its last axis

    def count(mask: Any) -> Any:
        return xp.sum(mask, axis=-1, dtype=np.int32)

    return Counts(
        elements=count(code != NOT_RUN),
        inf=count((code == kind.infinity) | (code == BORN_INF)),
        nan=count((code > kind.infinity) | (code == BORN_NAN)),
        zero=count((code == 0) | (code == UNDERFLOW)),
        subnormal=count((code > 0) & (code < kind.normal)),
        underflow=count(code == UNDERFLOW),
        born=count((code == BORN_INF) | (code == BORN_NAN)),
        largest=xp.max(xp.where(finite, code, 0), axis=-1, initial=0),
        smallest=xp.min(xp.where(finite & (code > 0), code, NO_MAGNITUDE), axis=-1, initial=NO_MAGNITUDE),
        census=count(finite[..., None, :] & (code[..., None, :] > marks[:, None])) if thresholds else None,
    )


def number(bits: int, dtype: str) -> float:
    """The magnitude whose bits these are."""
    return float(np.asarray(bits, np.int64).astype(FORMATS[dtype].integer).view(jnp.dtype(dtype)))


def bits_of_number(value: float, dtype: str) -> int:
    """The bits of a magnitude, rounded to the type."""
    return int(np.asarray(value).astype(jnp.dtype(dtype)).view(FORMATS[dtype].integer))
