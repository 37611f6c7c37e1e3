"""The operands of a product without what they lack: padding around the left one, phases of the right one that have no elements."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from tpuflow.device.fast.access import Trips
from tpuflow.device.fast.lax_existing import Exists
from tpuflow.device.fast.phases import Phases, phases_of
from tpuflow.device.fast.virtual import Lifting, Virtual
from tpuflow.isa.bounds import Bound, exists
from tpuflow.isa.matrix import MatmulAccumulate

BATCH_LABEL = 1000


@dataclass(frozen=True, slots=True)
class Factors:
    """The left operand, how many zeros stand before it along the axis of each pair, and what tells where the operands have elements
    (None: everywhere); zeros before and after `a` do not exist. `phases`: of the right operand."""

    a: Any
    before: tuple[int, ...]
    a_exists: Exists | None
    b_exists: Exists | None
    phases: tuple[Phases, ...] = ()


def labels_of(value: Virtual, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The labels of a virtual tensor's axes."""
    return (*(BATCH_LABEL + g for g in value.batch), *axes)


def factors_of(t: Lifting, i: MatmulAccumulate, trips: Trips, a: Virtual, b: Virtual, sizes: Mapping[int, int]) -> Factors:
    """What is to be multiplied. Bit-exact sums take place as the device makes them, padding included."""
    of_a, of_b = i.bounds_by_operand()
    pairs = tuple(replace(p, axis=p.axis + len(a.batch)) for p in i.pairs)
    own = t.ar.bitexact or not i.a.dtype.is_float or bool(trips.index)
    phases = None if own else phases_of(of_b, i.pairs, i.b_axes, i.acc_axes, sizes)
    if phases is not None:
        of_b = ()
    within, array, before = None if own or a.batch else a.inside, a.array, (0,) * len(pairs)
    if within is not None and (rest := _beyond(of_a, i, within.around, within.array.shape)) is not None:
        array, before, of_a = within.array, tuple(within.around[p.axis][0] for p in i.pairs), rest
        everywhere: Exists | None = functools.partial(jnp.ones, (1,) * array.ndim, jnp.bool_)
    else:
        everywhere = None
    axis_of = i.axis_of

    def start(label: int) -> Any:
        axis = axis_of[label]
        return trips.index[axis.grid] * axis.size if axis.grid in trips.index else 0

    a_exists = functools.partial(exists, of_a, labels_of(a, i.a_axes), pairs, array.shape, start, t.ar.positions)
    b_exists = functools.partial(exists, of_b, labels_of(b, i.b_axes), (), b.array.shape, start, t.ar.positions)
    return Factors(array, before, a_exists if of_a else everywhere, b_exists if of_b else None, phases or ())


def _beyond(
    of_a: Sequence[Bound], i: MatmulAccumulate, around: Sequence[tuple[int, int]], shape: Sequence[int]
) -> tuple[Bound, ...] | None:
    """The bounds of a that say more than that its padding does not exist; None if some of its padding does, or lies along no pair."""
    rest = list(of_a)
    for axis, (low, high) in enumerate(around):
        if low == high == 0:
            continue
        found = [x for x in rest if any(p.axis == axis for p in i.pairs) and x.factors(i.a_axes, i.pairs) == {axis: 1} and x.dilation == 1]
        if len(found) != 1:
            return None
        (bound,) = found
        first, last = bound.origin + low, bound.origin + low + shape[axis]  # the elements' places
        if first < 0 or last > bound.extent or (low and first > 0) or (high and last < bound.extent):
            return None
        rest.remove(bound)
    return tuple(rest)
