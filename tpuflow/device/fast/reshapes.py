"""Reshapes of traced arrays, of which one after the other becomes one.

A kernel writes a buffer in the buffer's shape, and the next one reads it in the shape of its own tiles: XLA is given one reshape for the
two, or none. It would find that out too, but takes long to: with them a transformer's step has a sixth more operations.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

from jax import lax

from tpuflow.jaxprs.compat import Tracer

_sources: dict[int, tuple[weakref.ref[Any], Any]] = {}
"""Of traced arrays that `reshaped` has made, by their `id`: themselves, and what they are a reshape of, while they are used."""


def reshaped(x: Any, shape: Sequence[int]) -> Any:
    """`x` in another shape; if it is a reshape itself, its operand is reshaped."""
    source = unreshaped(x)
    made = lax.reshape(source, shape)
    if made is not source and isinstance(made, Tracer):
        key = id(made)
        _sources[key] = weakref.ref(made, lambda _: _sources.pop(key, None)), source
    return made


def transposed(x: Any, permutation: Sequence[int]) -> Any:
    """`x` with its axes in another order; if only axes of one element move, that is a reshape."""
    moved = [axis for axis in permutation if x.shape[axis] != 1]
    if all(a < b for a, b in itertools.pairwise(moved)):
        return reshaped(x, [x.shape[axis] for axis in permutation])
    return lax.transpose(x, permutation)


def unreshaped(x: Any) -> Any:
    """What a reshape was made of; another array itself."""
    known = _sources.get(id(x))
    return x if known is None or known[0]() is not x else known[1]
