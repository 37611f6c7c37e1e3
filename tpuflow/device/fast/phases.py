"""Strided transposed convolutions by phase (sub-pixel decomposition): one product for each output phase, of the kernel elements it meets.

The input gradient of a strided convolution is such: each output position modulo the stride meets other elements of the kernel. Of a 3x3
kernel with strides of 2, the four phases meet 4 + 2 + 2 + 1 elements, 9 of the 16 positions that the product would have with padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from tpuflow.device.fast.lax_rounding import materialized
from tpuflow.isa.bounds import Bound
from tpuflow.isa.contraction import Contraction

MOST_PHASES = 16  # of a product: each is a convolution to compile and to start

Value = Any
Multiply = Callable[[Value, Value, Sequence[int], Mapping[int, int]], Value]
"""(a, b, low padding of each sliding axis, lengths by label) -> their product."""


@dataclass(frozen=True, slots=True)
class Phases:
    """The phases along one axis: `label` numbers them, `inner` is the kernel position, `ranges` its [start, stop) in each phase."""

    label: int
    inner: int
    ranges: tuple[tuple[int, int], ...]


def phases_of(whole: Contraction, sizes: Mapping[int, int]) -> tuple[Phases, ...] | None:
    """The bounds of the right operand as phases; None if it has none, some bound is no decomposition into phases, a phase has no elements,
    or they are too many."""
    inner, free = {s.label for s in whole.sliding} & set(whole.rhs), {*whole.batch, *whole.columns}
    found = [_phases(bound, inner, free, sizes) for bound in whole.rhs_bounds]
    known = tuple(x for x in found if x is not None and all(stop > start for start, stop in x.ranges))
    labels = [label for x in known for label in (x.label, x.inner)]
    distinct = len(known) == len(found) and len(set(labels)) == len(labels)
    return known if known and distinct and math.prod(len(x.ranges) for x in known) <= MOST_PHASES else None


def _phases(bound: Bound, inner: set[int], free: set[int], sizes: Mapping[int, int]) -> Phases | None:
    terms = dict(bound.terms)
    slides, stays = [x for x in terms if x in inner], [x for x in terms if x in free and x not in inner]
    if len(terms) != 2 or len(slides) != 1 or len(stays) != 1:
        return None
    (slide,), (stay,) = slides, stays

    def positions(phase: int) -> tuple[int, int]:
        there = [t for t in range(sizes[slide]) if bound.holds(bound.origin + terms[slide] * t + terms[stay] * phase)]
        return (there[0], there[-1] + 1) if there else (0, 0)

    return Phases(stay, slide, tuple(positions(phase) for phase in range(sizes[stay]))) if bound.dilation == 1 else None


def in_phases(
    phases: Sequence[Phases], multiply: Multiply, a: Value, b: Value, whole: Contraction, low_padding: Sequence[int],
    sizes: Mapping[int, int],
) -> Value:  # fmt: skip
    """The product of each phase, concatenated along the labels of the phases and written so: its readers would pick each element anew."""
    if not phases:
        return multiply(a, b, low_padding, sizes)

    def one(chosen: Sequence[int]) -> Value:
        ranges = {x.inner: x.ranges[n] for x, n in zip(phases, chosen, strict=True)}
        places = ranges | {x.label: (n, n + 1) for x, n in zip(phases, chosen, strict=True)}
        lengths = {**sizes, **{label: stop - start for label, (start, stop) in places.items()}}
        starts, stops = zip(*(places.get(x, (0, n)) for x, n in zip(whole.rhs, b.shape, strict=True)), strict=True)
        moved = [zeros - ranges.get(s.label, (0, 0))[0] * s.dilation for s, zeros in zip(whole.sliding, low_padding, strict=True)]
        return multiply(a, lax.slice(b, starts, stops), moved, lengths)

    def together(chosen: tuple[int, ...]) -> Value:
        if len(chosen) == len(phases):
            return one(chosen)
        here = phases[len(chosen)]
        return lax.concatenate([together((*chosen, n)) for n in range(len(here.ranges))], whole.out.index(here.label))

    return materialized(together(()))
