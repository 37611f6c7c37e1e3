"""The rule of convolutions: one product with labelled axes, in which every spatial axis of the image carries two labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpuflow.dtypes import F32, S32
from tpuflow.isa.bounds import Bound
from tpuflow.isa.instruction import MAX_RANK
from tpuflow.lower.frontend.registry import lowers
from tpuflow.lower.frontend.rules.linear import convert_result, operands, precision_of, result_dtype
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.conv import ConvLabels, Slide
from tpuflow.lower.graph.graph import TensorType, Value

_Named = tuple[tuple[int, int], ...]  # the axes that an axis is split into, major first: (label, length)

IMAGE, CHANNEL, FEATURE, GROUP, SPATIAL = range(5)


@dataclass(frozen=True, slots=True)
class _Axis:
    """One spatial axis, number `number`: lengths of image and kernel, and how one slides over the other."""

    number: int
    size: int
    window: int
    stride: int
    low: int
    high: int
    image_dilation: int
    kernel_dilation: int

    @property
    def outer(self) -> int:
        """Label of the output position."""
        return SPATIAL + 3 * self.number

    @property
    def inner(self) -> int:
        """Label of the kernel position."""
        return SPATIAL + 3 * self.number + 1

    @property
    def phase(self) -> int:
        """Label of the output position's remainder by the image's dilation."""
        return SPATIAL + 3 * self.number + 2

    @property
    def out(self) -> int:
        """Output positions."""
        dilated = (self.size - 1) * self.image_dilation + 1 if self.size else 0
        reach = (self.window - 1) * self.kernel_dilation + 1 if self.window else 0
        return max(0, (dilated + self.low + self.high - reach) // self.stride + 1)

    @property
    def meets(self) -> bool:
        """Whether, of a kernel of one position and one output, the one lies on an element at the other (longer ones: perhaps)."""
        element, between = divmod(-self.low, self.image_dilation)
        return self.window > 1 or self.out > 1 or (between == 0 and 0 <= element < self.size)

    @property
    def is_plain(self) -> bool:
        """Whether output position i is image position i and nothing else."""
        return (self.window, self.stride, self.low, self.high, self.image_dilation) == (1, 1, 0, 0, 1)

    @property
    def is_spread(self) -> bool:
        """Whether the outputs are the image positions with zeros between them: no reason to multiply those."""
        return self.window == self.stride == 1 and self.image_dilation > 1 and self.out > 0

    @property
    def has_phases(self) -> bool:
        """Whether a dilated image is better seen as several outputs of one that is not dilated (the gradient of a strided convolution)."""
        return self.stride == self.kernel_dilation == 1 and 1 < self.image_dilation < self.out and self.window > 1


@lowers("conv_general_dilated")
def _conv_general_dilated(
    b: Builder, lhs: Value, rhs: Value, *,
    window_strides: Sequence[int], padding: Sequence[tuple[int, int]], lhs_dilation: Sequence[int], rhs_dilation: Sequence[int],
    dimension_numbers: Any, feature_group_count: int, batch_group_count: int, precision: Any, preferred_element_type: Any,
) -> Value:  # fmt: skip
    result = result_dtype(lhs, rhs, preferred_element_type)
    lhs, rhs = operands(b, lhs, rhs, result)
    image, kernel, out = dimension_numbers
    axes = [
        _Axis(number, lhs.shape[i], rhs.shape[k], stride, low, high, spread, dilation)
        for number, (i, k, stride, (low, high), spread, dilation) in enumerate(
            zip(image[2:], kernel[2:], window_strides, padding, lhs_dilation, rhs_dilation, strict=True)
        )
    ]
    narrow = [replace(a, low=0, high=0, image_dilation=1) if a.is_spread else a for a in axes]
    groups = (batch_group_count, feature_group_count)
    product = _product(b, lhs, rhs, narrow, (image, kernel, out), groups, precision_of(precision))
    return convert_result(b, _spread(b, product, [(place, a) for place, a in zip(out[2:], axes, strict=True) if a.is_spread]), result)


def _product(
    b: Builder, lhs: Value, rhs: Value, axes: Sequence[_Axis], specs: Sequence[Sequence[int]], groups: tuple[int, int], precision: str
) -> Value:
    """The convolution, its axes in their places in the result."""
    (image, kernel, out), (batch_groups, feature_groups) = specs, groups
    count = batch_groups * feature_groups
    images, channels = lhs.shape[image[0]] // batch_groups, lhs.shape[image[1]] // feature_groups
    features = rhs.shape[kernel[0]] // count
    shape = dict(zip(out, (images, count * features, *(a.out for a in axes)), strict=True))
    whole = TensorType(F32 if lhs.dtype.is_float else S32, tuple(shape[place] for place in sorted(shape)))
    if 0 in (*lhs.shape, *rhs.shape, *whole.shape) or not all(a.meets for a in axes):
        return b.full(whole, 0)
    phased = [a for a in axes if a.has_phases and count == 1 and len(out) + sum(x.has_phases for x in axes) <= MAX_RANK]
    group = ((GROUP, count),) if count > 1 else ()
    left: dict[int, _Named] = {image[0]: ((IMAGE, images),), image[1]: ((CHANNEL, channels),)}
    right: dict[int, _Named] = {kernel[0]: (*group, (FEATURE, features)), kernel[1]: ((CHANNEL, channels),)}
    made: dict[int, _Named] = {out[0]: ((IMAGE, images),), out[1]: right[kernel[0]]}
    split = image[0] if batch_groups > 1 else image[1]
    left[split] = (*group, *left[split])
    for a, i, k, o in zip(axes, image[2:], kernel[2:], out[2:], strict=True):
        left[i], right[k], made[o] = ((a.outer, a.size),), ((a.inner, a.window),) if not a.is_plain else (), ((a.outer, a.out),)
        if a in phased:
            rhs, right[k], made[o] = _phases(b, rhs, k, a)
    bounds = tuple(_bound(a) for a in phased)
    slides = {a.outer: _slide(a, dict(made[o])[a.outer], phased=a in phased) for a, o in zip(axes, out[2:], strict=True) if not a.is_plain}
    lhs, rhs = (_split(b, x, names) for x, names in ((lhs, left), (rhs, right)))
    (lhs_labels, _), (rhs_labels, _), (out_labels, lengths) = map(_named, (left, right, made))
    rhs = b.reverse(rhs, [rhs_labels.index(a.phase) for a in phased])
    placed = tuple(replace(slide, axis=lhs_labels.index(label)) for label, slide in slides.items())
    product = b.conv(lhs, rhs, ConvLabels(lhs_labels, rhs_labels, out_labels, placed, precision, bounds))
    assert product.shape == lengths
    product = b.reshape(product, [math.prod(n for _, n in made[place]) for place in sorted(made)])
    return b.slice(product, [0] * len(whole.shape), whole.shape)


def _phases(b: Builder, rhs: Value, place: int, a: _Axis) -> tuple[Value, _Named, _Named]:
    """The kernel padded to whole turns of the phases, the names of its axis and of the output's.

    Output s q + p meets kernel position r at image element (s q + p + r - low) / s, where that is whole. With r = s t + m - p and
    m = low mod s it is q + t - floor(low / s), whatever the phase p: all phases are outputs of one product with a kernel [t, s - 1 - p].
    """
    s, low = a.image_dilation, _padding(a)
    turns = -(-(a.window + low) // s)
    amounts = [[n if axis == place else 0 for axis in range(len(rhs.shape))] for n in (low, turns * s - low - a.window)]
    return b.pad(rhs, 0, *amounts), ((a.inner, turns), (a.phase, s)), ((a.outer, -(-a.out // s)), (a.phase, s))


def _padding(a: _Axis) -> int:
    """Zeros before the kernel."""
    return a.image_dilation - 1 - a.low % a.image_dilation


def _bound(a: _Axis) -> Bound:
    """Where the kernel of all phases has elements: at turn t of phase p it is at s t + s - 1 - p of the padded axis."""
    s = a.image_dilation
    return Bound(a.window, ((a.inner, s), (a.phase, -1)), s - 1 - _padding(a))


def _slide(a: _Axis, size: int, *, phased: bool) -> Slide:
    """How the axis slides (its place in lhs is left open)."""
    if phased:
        return Slide(0, a.inner, size, low=a.low // a.image_dilation)
    return Slide(0, a.inner, size, a.stride, a.kernel_dilation, a.low, a.image_dilation)


def _named(names: dict[int, _Named]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(labels, lengths) of the axes that an array's axes are split into."""
    pairs = [pair for place in sorted(names) for pair in names[place]]
    return tuple(label for label, _ in pairs), tuple(n for _, n in pairs)


def _split(b: Builder, x: Value, names: dict[int, _Named]) -> Value:
    return b.reshape(x, _named(names)[1])


def _spread(b: Builder, x: Value, axes: Sequence[tuple[int, _Axis]]) -> Value:
    """Zeros around and between the outputs along the axes at the given places."""
    low, high, interior = ([0] * len(x.shape) for _ in range(3))
    for place, a in axes:
        low[place], high[place], interior[place] = a.low, a.high, a.image_dilation - 1
    return b.pad(x, 0, low, high, interior)
