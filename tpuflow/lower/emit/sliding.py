"""Sliding axes of convolutions in a kernel: the input positions that output and kernel positions address together, in halo tiles.

A halo tile holds what one block of output positions and one block of kernel positions reach; neighbouring tiles overlap.
Where one of the two positions has length 1, the axis is an ordinary one that the other walks over in strides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tpuflow.isa.bounds import Bound
from tpuflow.isa.contraction import Contraction, Halo, Labels, SlidingAxis
from tpuflow.isa.instruction import TileAxis, WindowAxis
from tpuflow.lower.emit.nest import Axis, Nest, Unit, walk


def halo_labels(contraction: Contraction) -> dict[int, SlidingAxis]:
    """A new label for the halo of each sliding axis."""
    return dict(enumerate(contraction.sliding, contraction.unused))


def with_halos(contraction: Contraction) -> Labels:
    """The labels of lhs, with the halo's label in place of every sliding axis's outer label."""
    halos = {s.axis: label for label, s in halo_labels(contraction).items()}
    return tuple(halos.get(axis, label) for axis, label in enumerate(contraction.lhs))


@dataclass(frozen=True, slots=True)
class MergedSliding:
    """A sliding axis among merged axes: `axis` is what it reads; `outer` and `inner` are its labels', None where one has length 1.

    `bound`: which elements it reads, in merged axes. `reverse`: the inner label counts from the end of the right operand's axis; stride
    and dilation are positive. `own` is what names the axis in the instruction: the outer axis, else the inner one, else one of size 1.
    """

    axis: int
    outer: int | None
    inner: int | None
    own: Axis
    stride: int
    dilation: int
    bound: Bound
    reverse: bool

    @classmethod
    def of(
        cls, axis_of: Mapping[int, int], label: int, s: SlidingAxis, contraction: Contraction, sizes: Mapping[int, int]
    ) -> MergedSliding:
        """A sliding axis whose halo has a label. Merged axes are looked up in `axis_of`; lengths of labels in `sizes`."""
        outer, inner = axis_of.get(contraction.lhs[s.axis]), axis_of.get(s.label)
        own = next((a for a in (outer, inner) if a is not None), Unit(f"point {s.axis}"))
        bound = contraction.bound_of(s)
        assert bound is not None, "a sliding axis of the graph has a bound"
        if s.dilation < 0:
            bound = bound.from_the_end({s.label: sizes[s.label]})
        return cls(axis_of[label], outer, inner, own, s.stride, abs(s.dilation), merged_bound(bound, axis_of), s.dilation < 0)

    @property
    def slides(self) -> bool:
        """Whether two labels address the axis."""
        return None not in (self.outer, self.inner)

    def sliding(self, axis: int, inner: int) -> SlidingAxis:
        """As an axis of an operand, its inner label being `inner`."""
        return SlidingAxis(axis, inner, self.stride, self.dilation)

    def cut(self, nest: Nest) -> Nest:
        """The nest with this axis's tile axis and walks, once its labels are cut."""
        axes, walks = list(nest.axes), dict(nest.walks)
        axes[self.axis], walks[self.axis] = self._halo(nest) or self._single(nest)
        if self.reverse and self.inner is not None:
            length = nest.sizes[self.inner]
            walks[self.inner] = walk(nest.axes[self.inner], length, 1, origin=length - 1, step=-1)
        return replace(nest, axes=tuple(axes), walks=walks, bounds={**nest.bounds, self.axis: self.bound})

    def _halo(self, nest: Nest) -> tuple[TileAxis, WindowAxis] | None:
        if self.outer is None or self.inner is None:
            return None
        halo = Halo(self.sliding(self.axis, self.inner), nest.axes[self.outer], nest.axes[self.inner])
        return halo.tile, WindowAxis(self.bound.extent, 1, self.bound.origin, halo.moves, 1, self.bound.dilation)

    def _single(self, nest: Nest) -> tuple[TileAxis, WindowAxis]:
        axis, step = nest.axis(self.own), self.dilation if self.outer is None else self.stride
        return axis, walk(axis, self.bound.extent, 1, origin=self.bound.origin, step=step, dilation=self.bound.dilation)


def merged_bound(bound: Bound, axis_of: Mapping[int, int]) -> Bound:
    """A bound in merged axes: labels of length 1 always stand at position 0."""
    return replace(bound, terms=tuple((axis_of[label], factor) for label, factor in bound.terms if label in axis_of))
