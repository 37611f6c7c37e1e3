"""The operands of a product without what they lack: padding around the left one, phases of the right one that have no elements."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from tpuflow.device.fast.access import Trips
from tpuflow.device.fast.lax_masked_product import Mask
from tpuflow.device.fast.phases import Phases, phases_of
from tpuflow.device.fast.virtual import Chips, Lifting, Virtual
from tpuflow.isa.bounds import Bound
from tpuflow.isa.contraction import Contraction
from tpuflow.isa.matrix import MatmulAccumulate


@dataclass(frozen=True, slots=True)
class Factors:
    """The left operand, how many zeros stand before it along each sliding axis, and what tells where the operands have elements
    (None: everywhere); zeros before and after `a` do not exist. `phases`: of the right operand."""

    a: Any
    before: tuple[int, ...]
    a_mask: Mask | None
    b_mask: Mask | None
    phases: tuple[Phases, ...] = ()

    def of_chips(self, chips: Chips) -> Factors:
        """The same of all chips: one more axis in front."""
        return replace(self, a=chips(self.a), a_mask=_in_front(self.a_mask), b_mask=_in_front(self.b_mask))


def _in_front(mask: Mask | None) -> Mask | None:
    return None if mask is None else lambda: mask()[None]


def factors_of(t: Lifting, i: MatmulAccumulate, trips: Trips, a: Virtual, b: Virtual, sizes: Mapping[int, int]) -> Factors:
    """What is to be multiplied. Bit-exact sums take place as the device makes them, padding included."""
    whole = i.contraction
    of_a, of_b = whole.lhs_bounds, whole.rhs_bounds
    own = t.ar.bitexact or not i.a.dtype.is_float or bool(trips.index)
    phases = None if own else phases_of(whole, sizes)
    if phases is not None:
        of_b = ()
    within, array, before = None if own or a.batch else a.inside, a.array, (0,) * len(whole.sliding)
    everywhere: Mask | None = None
    if within is not None and (rest := _beyond(whole, within.around, within.array.shape)) is not None:
        array, before, of_a = within.array, tuple(within.around[s.axis][0] for s in whole.sliding), rest
        everywhere = functools.partial(jnp.ones, (1,) * array.ndim, jnp.bool_)
    tiles = whole.by_label(i.a.axes, i.b.axes, i.acc.axes)

    def start(label: int) -> Any:
        axis = tiles[label]
        return trips.index[axis.grid] * axis.size if axis.grid in trips.index else 0

    known = replace(whole, bounds=(*of_a, *of_b)).with_batches(a.batch, b.batch, ())
    a_mask = functools.partial(known.lhs_mask, array.shape, start, t.ar.positions)
    b_mask = functools.partial(known.rhs_mask, b.array.shape, start, t.ar.positions)
    return Factors(array, before, a_mask if of_a else everywhere, b_mask if of_b else None, phases or ())


def _beyond(whole: Contraction, around: Sequence[tuple[int, int]], shape: Sequence[int]) -> tuple[Bound, ...] | None:
    """The bounds of lhs that say more than that its padding does not exist; None if some of its padding does, or lies along no sliding
    axis."""
    rest, sliding = list(whole.lhs_bounds), {s.axis for s in whole.sliding}
    for axis, (low, high) in enumerate(around):
        if low == high == 0:
            continue
        found = [x for x in rest if axis in sliding and whole.along_lhs(x) == {axis: 1} and x.dilation == 1]
        if len(found) != 1:
            return None
        (bound,) = found
        first, last = bound.origin + low, bound.origin + low + shape[axis]  # the elements' places
        if first < 0 or last > bound.extent or (low and first > 0) or (high and last < bound.extent):
            return None
        rest.remove(bound)
    return tuple(rest)
