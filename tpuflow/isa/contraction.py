"""Matrix products and convolutions by labelled axes, as in einsum; graph, matrix instruction and both engines share this description."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from tpuflow.isa.bounds import Bound
from tpuflow.isa.instruction import TileAxis, WindowAxis

Labels = tuple[int, ...]
StartOf = Callable[[int], Any]
"""Label -> the position of a tile's first element on the whole axis, an integer that may be traced."""
PositionsAlong = Callable[[tuple[int, ...], int], Any]
"""`Arithmetic.positions`: (shape, axis) -> 0, 1, ... along the axis, s32 of that shape."""
MakePatches = Callable[[Any, int, int, int, int, int], Any]
"""`Arithmetic.patches`: (array, axis, outer length, inner length, stride, dilation) -> the array with two axes for the one."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SlidingAxis:
    """An axis of a product's left operand that two labels address: position = outer * stride + inner * dilation.

    `axis` is the operand's axis, whose own label is the outer one; `label` is the inner one. That is how the matrix unit's feeder
    makes the patches of a convolution out of a halo tile: outer is the output position, inner the kernel position.
    """

    axis: int
    label: int
    stride: int = 1
    dilation: int = 1

    def __str__(self) -> str:
        return f"{self.axis} stride {self.stride} label {self.label} dilation {self.dilation}"

    def terms(self, outer: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(label, factor) of both labels, the outer one being `outer`."""
        return (outer, self.stride), (self.label, self.dilation)

    def reach(self, outer: int, inner: int) -> int:
        """Length of the part of the axis that `outer` and `inner` positions (at least one of each) cover."""
        return (outer - 1) * self.stride + (inner - 1) * self.dilation + 1

    def bound(self, outer: int, extent: int, low: int = 0, interior: int = 1) -> Bound:
        """Where there are elements along an axis of `extent`, with `low` zeros before it and `interior` - 1 between neighbours."""
        return Bound(extent, self.terms(outer), -low, interior)


@dataclass(frozen=True, slots=True)
class Halo:
    """The tile of a sliding axis: the positions that a tile of output positions (`outer`) and one of kernel positions (`inner`) address.

    Neighbouring tiles overlap; those of the whole grid cover one contiguous range.
    """

    sliding: SlidingAxis
    outer: TileAxis
    inner: TileAxis

    @property
    def tile(self) -> TileAxis:
        """The axis of the left operand's tile."""
        return TileAxis(self.sliding.reach(self.outer.size, self.inner.size))

    @property
    def moves(self) -> tuple[tuple[int, int], ...]:
        """(grid axis, positions by which its trips move the tile)."""
        moves = ((self.outer.grid, self.outer.size * self.sliding.stride), (self.inner.grid, self.inner.size * self.sliding.dilation))
        return tuple((g, elements) for g, elements in moves if g >= 0)

    def fits(self, axis: WindowAxis) -> bool:
        """Whether a window axis moves as the labels do and in no other way."""
        return dict(axis.grid) == dict(self.moves) and axis.step == 1 and axis.register is None


@dataclass(frozen=True)
class Contraction:
    """A product of two operands whose axes are named by labels, as in einsum.

    A label in lhs, rhs and out is a batch axis, in lhs and out (rhs and out) a row (column) axis, in lhs and rhs alone a contracted one;
    every label is in at least two of the three. An axis of lhs in `sliding` has two labels; what is said of lhs's labels holds for
    both of them, and the axis is of neither's length. `bounds` say where an operand has elements: each is one of both labels of a sliding
    axis, or of other labels of lhs, or else of rhs. What lies elsewhere takes part in no product.
    """

    lhs: Labels
    rhs: Labels
    out: Labels
    sliding: tuple[SlidingAxis, ...] = ()
    bounds: tuple[Bound, ...] = ()

    def __str__(self) -> str:
        sides = "{} . {} -> {}".format(*(f"[{','.join(map(str, x))}]" for x in (self.lhs, self.rhs, self.out)))
        lists = (("sliding", self.sliding), ("bounds", self.bounds))
        return " ".join((sides, *(f"{name} [{', '.join(map(str, found))}]" for name, found in lists if found)))

    # --- labels by their roles ----------------------------------------------------------------------------------------

    @cached_property
    def patch(self) -> Labels:
        """Labels of lhs's axes once each sliding axis is two: outer, inner."""
        if not self.sliding:
            return self.lhs
        inner = {s.axis: (s.label,) for s in self.sliding}
        return tuple(label for axis, own in enumerate(self.lhs) for label in (own, *inner.get(axis, ())))

    @cached_property
    def batch(self) -> Labels:
        """Labels of the result that both operands have, in the result's order."""
        patch = self.patch
        return tuple(x for x in self.out if x in patch and x in self.rhs)

    @cached_property
    def rows(self) -> Labels:
        """Labels of the result that only lhs has, in the result's order."""
        return tuple(x for x in self.out if x not in self.rhs)

    @cached_property
    def columns(self) -> Labels:
        """Labels of the result that only rhs has, in the result's order."""
        patch = self.patch
        return tuple(x for x in self.out if x not in patch)

    @cached_property
    def contracted(self) -> Labels:
        """Labels that are summed over, in the order of the sum: lhs's."""
        return tuple(x for x in self.patch if x not in self.out)

    @cached_property
    def roles(self) -> tuple[Labels, Labels, Labels, Labels]:
        """Batch, rows, columns and contracted."""
        return self.batch, self.rows, self.columns, self.contracted

    @cached_property
    def outer(self) -> dict[int, SlidingAxis]:
        """The sliding axes by their outer labels, in the order of lhs's axes."""
        return {self.lhs[s.axis]: s for s in sorted(self.sliding, key=lambda s: s.axis)}

    @cached_property
    def placed(self) -> frozenset[int]:
        """Labels whose positions matter: those of sliding axes and of bounds."""
        slide = {x for outer, s in self.outer.items() for x in (outer, s.label)}
        return frozenset(slide | {x for bound in self.bounds for x, _ in bound.terms})

    @cached_property
    def unused(self) -> int:
        """A label above all others."""
        return 1 + max((*self.patch, *self.rhs, *self.out), default=-1)

    # --- what labels stand for ----------------------------------------------------------------------------------------

    def by_label(self, lhs: Sequence[_T], rhs: Sequence[_T], out: Sequence[_T] = ()) -> dict[int, _T]:
        """Label -> the value (a length, a tile axis) of its axis, given one value for every axis; `out` is needed if an axis slides.

        In the order of labels in lhs, then in rhs, then in the result.
        """
        found = self._own(lhs) | dict(zip(self.rhs, rhs, strict=True)) | dict(zip(self.out, out, strict=bool(out)))
        return {label: found[label] for label in dict.fromkeys((*self.lhs, *found))}

    def _own(self, lhs: Sequence[_T]) -> dict[int, _T]:
        slides = {s.axis for s in self.sliding}
        return {label: x for axis, (label, x) in enumerate(zip(self.lhs, lhs, strict=True)) if axis not in slides}

    def differing(self, lhs: Sequence[_T], rhs: Sequence[_T], out: Sequence[_T]) -> tuple[int, _T, _T] | None:
        """The first label that stands for two different things, with both; None if there is none."""
        found: dict[int, _T] = {}
        axes = (*zip(self.out, out, strict=True), *self._own(lhs).items(), *zip(self.rhs, rhs, strict=True))
        return next(((label, found[label], x) for label, x in axes if found.setdefault(label, x) != x), None)

    def halos(self, lhs: Sequence[TileAxis], rhs: Sequence[TileAxis], out: Sequence[TileAxis]) -> dict[int, Halo]:
        """The halo of every sliding axis by the axis, given the axes of the tiles."""
        tiles = self.by_label(lhs, rhs, out)
        return {s.axis: Halo(s, tiles[self.lhs[s.axis]], tiles[s.label]) for s in self.sliding}

    def problem(self, lhs_rank: int, rhs_rank: int, out_rank: int) -> str:
        """What is wrong with the labels for operands and a result of these ranks; empty if nothing is."""
        axes = [s.axis for s in self.sliding]
        if len(set(axes)) != len(axes) or any(not 0 <= axis < min(lhs_rank, len(self.lhs)) for axis in axes):
            return f"pairs are of the axes {axes}; expected different axes of a, which has rank {lhs_rank}"
        for name, labels, rank in (("acc", self.out, out_rank), ("a", self.lhs, lhs_rank), ("b", self.rhs, rhs_rank)):
            if len(labels) != rank or len(set(labels)) != len(labels):
                return f"{name}_axes are {labels}; expected a different label for each of {rank} axes"
        kept, patch, rhs = set(self.out), set(self.patch), set(self.rhs)
        if len(patch) != len(self.patch) or kept - (patch | rhs) or (patch ^ rhs) - kept:
            return f"labels {self.out} = {self.patch} . {self.rhs}; expected every label in at least two of the three, once in each"
        return ""

    # --- elements and padding -----------------------------------------------------------------------------------------

    def along_lhs(self, bound: Bound) -> dict[int, int] | None:
        """Axis of lhs -> the factor of its position in the bound's sum; None if the bound is not about lhs.

        A sliding axis has factor 1: the factors of its two labels are the stride and dilation that the axis' position includes already.
        """
        terms = dict(bound.terms)
        for outer, s in self.outer.items():
            if terms == dict(s.terms(outer)):
                return {s.axis: 1}
        return _along(bound, [None if label in self.outer else label for label in self.lhs])

    def along_rhs(self, bound: Bound) -> dict[int, int] | None:
        """As `along_lhs`, of rhs."""
        return _along(bound, self.rhs)

    @property
    def lhs_bounds(self) -> tuple[Bound, ...]:
        """The bounds of lhs."""
        return tuple(x for x in self.bounds if self.along_lhs(x) is not None)

    @property
    def rhs_bounds(self) -> tuple[Bound, ...]:
        """The bounds of rhs."""
        return tuple(x for x in self.bounds if self.along_lhs(x) is None)

    def bound_of(self, sliding: SlidingAxis) -> Bound | None:
        """The bound whose sum is the position on a sliding axis; None if there is none."""
        return next((x for x in self.bounds if dict(x.terms) == dict(sliding.terms(self.lhs[sliding.axis]))), None)

    def lhs_mask(self, shape: tuple[int, ...], start: StartOf, along: PositionsAlong) -> Any:
        """pred: true where lhs, of `shape`, has elements, false in its padding; of size 1 along axes that make no difference. None without
        bounds."""
        return _mask([(x, self.along_lhs(x) or {}) for x in self.lhs_bounds], shape, start, along)

    def rhs_mask(self, shape: tuple[int, ...], start: StartOf, along: PositionsAlong) -> Any:
        """As `lhs_mask`, of rhs."""
        return _mask([(x, self.along_rhs(x) or {}) for x in self.rhs_bounds], shape, start, along)

    # --- other forms of the same product ------------------------------------------------------------------------------

    def patches(self, x: Any, sizes: Mapping[int, int], make: MakePatches) -> Any:
        """lhs with two axes for each sliding axis, by the labels of `patch`; sizes: of the labels of sliding axes."""
        for outer, s in reversed(self.outer.items()):
            x = make(x, s.axis, sizes[outer], sizes[s.label], s.stride, s.dilation)
        return x

    def of_patches(self) -> Contraction:
        """The same product of lhs's patches: no axis slides."""
        return Contraction(self.patch, self.rhs, self.out)

    def with_batches(self, lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int]) -> Contraction:
        """The same product of arrays with further leading axes, given by numbers: equal numbers are the same axis."""
        first = self.unused
        lhs_axes, rhs_axes, out_axes = (tuple(first + g for g in numbers) for numbers in (lhs, rhs, out))
        sliding = tuple(replace(s, axis=s.axis + len(lhs_axes)) for s in self.sliding)
        return replace(self, lhs=lhs_axes + self.lhs, rhs=rhs_axes + self.rhs, out=out_axes + self.out, sliding=sliding)


def _along(bound: Bound, labels: Sequence[int | None]) -> dict[int, int] | None:
    terms = dict(bound.terms)
    return {labels.index(label): factor for label, factor in terms.items()} if terms and set(terms) <= set(labels) else None


def _mask(bounds: Sequence[tuple[Bound, Mapping[int, int]]], shape: tuple[int, ...], start: StartOf, along: PositionsAlong) -> Any:
    found = None
    for bound, factors in bounds:
        place = bound.origin + sum(factor * start(label) for label, factor in bound.terms)
        for axis, factor in factors.items():
            place = place + factor * along(tuple(n if i == axis else 1 for i, n in enumerate(shape)), axis)
        found = bound.holds(place) if found is None else found & bound.holds(place)
    return found
