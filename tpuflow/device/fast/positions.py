"""The positions of a lifted tile's elements along one axis of a view, in closed form.

Every lifted grid axis, and the tile's own axis, contributes a stride and a count. Nothing here has an entry for each position; where the
translation needs all of them (for a gather), the compiled program computes them from an iota.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

SMALLEST, LARGEST = -(2**31), 2**31 - 1


class CannotLift(Exception):
    """This tier has no whole-tensor form for an instruction; the translator goes on with the next tier."""


@dataclass(frozen=True, slots=True)
class Dim:
    """`length` positions in blocks of `size`: number x is at stride * (x // size) + step * (x % size)."""

    length: int
    step: int
    size: int
    stride: int

    @classmethod
    def of(cls, length: int, step: int, size: int = 0, stride: int = 0) -> Dim:
        """Blocks of `size` that are `stride` apart (one block if size is 0), normalized to as few blocks as possible."""
        if size == 1:
            step, size = stride, 0
        if not size or length <= size or stride == step * size:
            return cls(length, step, max(length, 1), 0)
        return cls(length, step, size, stride)

    @property
    def even(self) -> bool:
        """Whether all neighbours are `step` apart."""
        return self.length <= self.size

    def ends(self) -> tuple[int, int]:
        """The least and the greatest of the positions, of which there is one at least."""
        last = (self.length - 1) // self.size
        full = max(0, self.length // self.size - 1)
        corners = [(0, 0), (0, min(self.size, self.length) - 1), (full, 0), (full, min(self.size, self.length) - 1)]
        corners += [(last, 0), (last, (self.length - 1) % self.size)]
        at = [block * self.stride + x * self.step for block, x in corners]
        return min(at), max(at)

    def within(self, inner: Dim) -> Dim | None:
        """This dimension and one inside it as one; None if they are not evenly spaced together."""
        if not inner.even or self.step != inner.step * inner.length:
            return None
        return Dim.of(self.length * inner.length, inner.step, self.size * inner.length, self.stride)

    def array(self) -> Any:
        """s32 [length], computed by the compiled program."""
        x = lax.iota(jnp.int32, self.length)
        if self.even:
            return x * np.int32(self.step)
        return (x // np.int32(self.size)) * np.int32(self.stride) + (x % np.int32(self.size)) * np.int32(self.step)


@dataclass(frozen=True)
class Positions:
    """Positions along one view axis (before dilation): `start` + one of each of `dims`, row-major, + `offset`, a scalar within `bounds`.

    `batch` names the lifted grid axes of the leading dims; the others make up the last axis of `shape` together.
    """

    start: int
    dims: tuple[Dim, ...]
    batch: tuple[int, ...] = ()
    offset: Any = 0
    bounds: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def even(cls, start: int, step: int, length: int) -> Positions:
        """start, start + step, ... so many."""
        return cls(start, (Dim.of(length, step),))

    @property
    def length(self) -> int:
        """Of the last axis."""
        return math.prod(d.length for d in self.dims[len(self.batch) :])

    @property
    def shape(self) -> tuple[int, ...]:
        """[batch..., length]."""
        return (*(d.length for d in self.dims[: len(self.batch)]), self.length)

    @property
    def known(self) -> bool:
        """Whether no looped grid axis and no register moves them."""
        return isinstance(self.offset, int)

    @property
    def progression(self) -> tuple[int, int] | None:
        """(first without the offset, step) if there is a position, no batch, and they are evenly spaced; else None."""
        if self.batch or not self.length:
            return None
        one = _as_one(self.dims)
        if one is None or not one.even:
            return None
        return self.start, one.step if one.length > 1 else 1

    def ends(self) -> tuple[int, int]:
        """The least and the greatest without the offset; of no positions, the start."""
        found = [d.ends() for d in self.dims] if all(self.shape) else []
        return self.start + sum(low for low, _ in found), self.start + sum(high for _, high in found)

    def array(self) -> Any:
        """s32 of `shape`, the offset included, computed by the compiled program."""
        low, high = self.ends()
        if low < SMALLEST or high > LARGEST:
            raise CannotLift(f"a window reaches from position {low} to {high}; expected 32-bit positions")
        lengths = tuple(d.length for d in self.dims)
        total = jnp.full(lengths, self.start, jnp.int32)
        for n, dim in enumerate(self.dims):
            total = total + dim.array().reshape([-1 if n == k else 1 for k in range(len(lengths))])
        return total.reshape(self.shape) + self.offset


def _as_one(dims: Sequence[Dim]) -> Dim | None:
    """The positions of all `dims` as one dimension; None if it takes several."""
    *outer, found = [d for d in dims if d.length != 1] or [Dim.of(1, 1)]
    for dim in reversed(outer):
        joined = dim.within(found)
        if joined is None:
            return None
        found = joined
    return found
