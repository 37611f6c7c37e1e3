"""The operands of a product as the native lift multiplies them: without padding around the left one, in phases of the right one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from tpuflow.device.fast.access import Trips
from tpuflow.device.fast.lax_masked_product import Mask
from tpuflow.device.fast.phases import Phases, phases_of
from tpuflow.device.fast.virtual import Gather, Lifting, Virtual
from tpuflow.isa.bounds import Bound
from tpuflow.isa.contraction import Contraction
from tpuflow.isa.matrix import MatmulAccumulate


@dataclass(frozen=True, slots=True)
class Operands:
    """The left operand `a`, and what the product must know of both.

    `low_padding`: zeros to pad before `a` along each sliding axis, which are padding like those after it. `a_mask`, `b_mask`: where the
    operands have elements (None: everywhere). `phases`: of the right operand (`tpuflow.device.fast.phases`).
    """

    a: Any
    low_padding: tuple[int, ...]
    a_mask: Mask | None
    b_mask: Mask | None
    phases: tuple[Phases, ...] = ()

    def of_chips(self, gather: Gather) -> Operands:
        """The operands of all chips, with a leading axis of chips."""
        return replace(self, a=gather(self.a), a_mask=_in_front(self.a_mask), b_mask=_in_front(self.b_mask))


def _in_front(mask: Mask | None) -> Mask | None:
    return None if mask is None else lambda: mask()[None]


def product_operands(t: Lifting, i: MatmulAccumulate, trips: Trips, a: Virtual, b: Virtual, sizes: Mapping[int, int]) -> Operands:
    """The operands of a lifted product. Padding and phases are taken out in native fidelity only: bit-exact sums are the device's own."""
    whole = i.contraction
    of_a, of_b = whole.lhs_bounds, whole.rhs_bounds
    own = t.ar.bitexact or not i.a.dtype.is_float or bool(trips.index)
    phases = None if own else phases_of(whole, sizes)
    bare, array, low_padding = None if own or a.batch else a.unpadded, a.array, (0,) * len(whole.sliding)
    everywhere: Mask | None = None
    if bare is not None and (rest := _other_bounds(whole, bare.around, bare.array.shape)) is not None:
        array, low_padding, of_a = bare.array, tuple(bare.around[s.axis][0] for s in whole.sliding), rest
        everywhere = functools.partial(jnp.ones, (1,) * array.ndim, jnp.bool_)
    tiles = whole.by_label(i.a.axes, i.b.axes, i.acc.axes)

    def start(label: int) -> Any:
        return trips.start(tiles[label])

    known = replace(whole, bounds=(*of_a, *of_b)).with_batches(a.batch, b.batch, ())
    a_mask = functools.partial(known.lhs_mask, array.shape, start, t.ar.positions)
    b_mask = functools.partial(known.rhs_mask, b.array.shape, start, t.ar.positions)
    return Operands(array, low_padding, a_mask if of_a else everywhere, b_mask if of_b else None, phases or ())


def _other_bounds(whole: Contraction, around: Sequence[tuple[int, int]], shape: Sequence[int]) -> tuple[Bound, ...] | None:
    """The bounds of lhs but for those that say no more than that its padding is padding. None if part of the padding counts as elements,
    or is along an axis that does not slide."""
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
