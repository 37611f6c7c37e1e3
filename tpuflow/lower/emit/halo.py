"""Halo axes: the axes of a convolution's left operand that an output position and a kernel position address together.

A tile of such an axis holds what one block of output positions and one block of kernel positions reach; neighbouring tiles overlap.
Where one of the two positions has length 1, the axis is an ordinary one that the other walks over in strides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tpuflow.isa.bounds import Bound
from tpuflow.isa.instruction import Pair, TileAxis, WindowAxis
from tpuflow.lower.emit.nest import Nest, walk
from tpuflow.lower.graph.conv import ConvLabels, Slide

NONE = -1
_FIRST_POINT = -10  # axes of size 1 that stand for halos with a single position: -10, -11, ...


def halo_labels(labels: ConvLabels) -> dict[int, Slide]:
    """A label of its own for every slide's axis."""
    first = 1 + max((*labels.patch, *labels.rhs, *labels.out), default=-1)
    return {first + i: slide for i, slide in enumerate(labels.slides)}


@dataclass(frozen=True, slots=True)
class Halo:
    """One halo: merged axes of the halo and of its two labels (NONE where a label has length 1), and how the buffer is walked.

    `reverse`: the inner label counts from the end of the right operand's axis; stride and dilation are positive. `own` is what names the
    axis in the instruction: the outer axis, else the inner one, else a stand-in.
    """

    axis: int
    outer: int
    inner: int
    own: int
    extent: int
    stride: int
    dilation: int
    origin: int
    interior: int
    reverse: bool

    @classmethod
    def of(
        cls, axis_of: Mapping[int, int], label: int, slide: Slide, labels: ConvLabels, shape: Sequence[int], sizes: Mapping[int, int]
    ) -> Halo:
        """The halo of a slide. Merged axes are looked up in `axis_of`; lengths of labels in `sizes`."""
        outer, inner = axis_of.get(labels.lhs[slide.axis], NONE), axis_of.get(slide.label, NONE)
        own = next((a for a in (outer, inner) if a != NONE), _FIRST_POINT - slide.axis)
        last = (sizes[slide.label] - 1) * min(0, slide.dilation)  # of a kernel read from its end: where position 0 is
        return cls(
            axis_of[label], outer, inner, own, shape[slide.axis], slide.stride, abs(slide.dilation), last - slide.low, slide.interior,
            slide.dilation < 0,
        )  # fmt: skip

    @property
    def is_pair(self) -> bool:
        """Whether two labels address the axis."""
        return NONE not in (self.outer, self.inner)

    @property
    def bound(self) -> Bound:
        """Where the left operand has elements, in merged axes."""
        terms = ((self.outer, self.stride), (self.inner, self.dilation))
        return Bound(self.extent, tuple((axis, factor) for axis, factor in terms if axis != NONE), self.origin, self.interior)

    def cut(self, nest: Nest) -> Nest:
        """The nest with this halo's tile axis and walks, once its labels are cut."""
        axes, walks = list(nest.axes), dict(nest.walks)
        axes[self.axis], walks[self.axis] = self._pair(nest) if self.is_pair else self._single(nest)
        if self.reverse and self.inner != NONE:
            length = nest.sizes[self.inner]
            walks[self.inner] = walk(nest.axes[self.inner], length, 1, origin=length - 1, step=-1)
        return replace(nest, axes=tuple(axes), walks=walks)

    def _pair(self, nest: Nest) -> tuple[TileAxis, WindowAxis]:
        outer, inner = nest.axes[self.outer], nest.axes[self.inner]
        reach = Pair(0, 0, self.stride, self.dilation).reach(outer.size, inner.size)
        moves = ((outer.grid, outer.size * self.stride), (inner.grid, inner.size * self.dilation))
        grid = tuple((g, elements) for g, elements in moves if g >= 0)
        return TileAxis(reach), WindowAxis(self.extent, 1, self.origin, grid, 1, self.interior)

    def _single(self, nest: Nest) -> tuple[TileAxis, WindowAxis]:
        axis = nest.axes[self.own] if self.own >= 0 else TileAxis(1)
        step = self.stride if self.outer != NONE else self.dilation
        return axis, walk(axis, self.extent, 1, origin=self.origin, step=step, dilation=self.interior)
