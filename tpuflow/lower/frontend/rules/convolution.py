"""The rule of convolutions: one product with labelled axes, in which every spatial axis of the image carries two labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpuflow.dtypes import F32, S32
from tpuflow.lower.frontend.registry import lowers
from tpuflow.lower.frontend.rules.linear import convert_result, operands, result_dtype
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.conv import ConvLabels, Slide
from tpuflow.lower.graph.graph import TensorType, Value

_Labels = dict[int, tuple[int, ...]]  # of every axis of an array: none (size 1, to be dropped), one, or a group and the rest

IMAGE, CHANNEL, FEATURE, GROUP, SPATIAL = range(5)  # labels; spatial axis k: SPATIAL + 2 k (output position), SPATIAL + 2 k + 1 (kernel)


@dataclass(frozen=True, slots=True)
class _Axis:
    """One spatial axis: lengths of image and kernel, and how one slides over the other."""

    size: int
    window: int
    stride: int
    low: int
    high: int
    image_dilation: int
    kernel_dilation: int

    @property
    def out(self) -> int:
        """Output positions."""
        dilated = (self.size - 1) * self.image_dilation + 1 if self.size else 0
        reach = (self.window - 1) * self.kernel_dilation + 1 if self.window else 0
        return max(0, (dilated + self.low + self.high - reach) // self.stride + 1)

    @property
    def is_plain(self) -> bool:
        """Whether output position i is image position i and nothing else."""
        return (self.window, self.stride, self.low, self.high, self.image_dilation) == (1, 1, 0, 0, 1)

    @property
    def is_spread(self) -> bool:
        """Whether the outputs are the image positions with zeros between them: no reason to multiply those."""
        return self.window == self.stride == 1 and self.image_dilation > 1 and self.out > 0


@lowers("conv_general_dilated")
def _conv_general_dilated(
    b: Builder, lhs: Value, rhs: Value, *,
    window_strides: Sequence[int], padding: Sequence[tuple[int, int]], lhs_dilation: Sequence[int], rhs_dilation: Sequence[int],
    dimension_numbers: Any, feature_group_count: int, batch_group_count: int, preferred_element_type: Any,
) -> Value:  # fmt: skip
    result = result_dtype(lhs, rhs, preferred_element_type)
    lhs, rhs = operands(b, lhs, rhs, result)
    image, kernel, out = dimension_numbers
    axes = [
        _Axis(lhs.shape[i], rhs.shape[k], stride, low, high, spread, dilation)
        for i, k, stride, (low, high), spread, dilation in zip(
            image[2:], kernel[2:], window_strides, padding, lhs_dilation, rhs_dilation, strict=True
        )
    ]
    spread = [a if a.is_spread else None for a in axes]
    narrow = [replace(a, low=0, high=0, image_dilation=1) if a.is_spread else a for a in axes]
    groups = (batch_group_count, feature_group_count)
    product = _product(b, lhs, rhs, narrow, (image, kernel, out), groups)
    return convert_result(b, _spread(b, product, spread, out[2:]), result)


def _product(b: Builder, lhs: Value, rhs: Value, axes: Sequence[_Axis], specs: Sequence[Sequence[int]], groups: tuple[int, int]) -> Value:
    """The convolution, its axes in their places in the result."""
    image, kernel, out = specs
    batch_groups, feature_groups = groups
    shape = list(range(len(out)))
    for place, size in zip(out, (lhs.shape[image[0]] // batch_groups, rhs.shape[kernel[0]], *(a.out for a in axes)), strict=True):
        shape[place] = size
    whole = TensorType(F32 if lhs.dtype.is_float else S32, tuple(shape))
    if 0 in (*lhs.shape, *rhs.shape, *shape):
        return b.full(whole, 0)
    outer = {place: SPATIAL + 2 * k for k, place in enumerate(image[2:])}
    inner = {place: SPATIAL + 2 * k + 1 for k, place in enumerate(kernel[2:]) if not axes[k].is_plain}
    left: _Labels = {image[0]: (IMAGE,), image[1]: (CHANNEL,), **{place: (label,) for place, label in outer.items()}}
    right: _Labels = {
        kernel[0]: (FEATURE,),
        kernel[1]: (CHANNEL,),
        **{place: (inner[place],) if place in inner else () for place in kernel[2:]},
    }
    made: _Labels = {out[0]: (IMAGE,), out[1]: (FEATURE,), **{place: (SPATIAL + 2 * k,) for k, place in enumerate(out[2:])}}
    if batch_groups * feature_groups > 1:
        split = image[0] if batch_groups > 1 else image[1]
        left[split], right[kernel[0]], made[out[1]] = (GROUP, *left[split]), (GROUP, FEATURE), (GROUP, FEATURE)
    lhs, lhs_labels = _labelled(b, lhs, left, batch_groups * feature_groups)
    rhs, rhs_labels = _labelled(b, rhs, right, batch_groups * feature_groups)
    slides = tuple(
        Slide(lhs_labels.index(SPATIAL + 2 * k), SPATIAL + 2 * k + 1, a.out, a.stride, a.kernel_dilation, a.low, a.image_dilation)
        for k, a in enumerate(axes)
        if not a.is_plain
    )
    labels = ConvLabels(lhs_labels, rhs_labels, tuple(label for place in sorted(made) for label in made[place]), slides)
    return b.reshape(b.conv(lhs, rhs, labels), whole.shape)


def _labelled(b: Builder, x: Value, labels: _Labels, groups: int) -> tuple[Value, tuple[int, ...]]:
    """x with an axis for every label: axes without one (of size 1) dropped, one with two split into groups and the rest."""
    sizes = [((), (n,), (groups, n // groups))[len(labels[axis])] for axis, n in enumerate(x.shape)]
    return b.reshape(x, [n for axis in sizes for n in axis]), tuple(label for axis in range(len(x.shape)) for label in labels[axis])


def _spread(b: Builder, x: Value, axes: Sequence[_Axis | None], places: Sequence[int]) -> Value:
    """Zeros around and between the outputs along the axes that are given."""
    amounts = [[0] * len(x.shape) for _ in range(3)]
    for axis, place in zip(axes, places, strict=True):
        if axis is not None:
            for amount, n in zip(amounts, (axis.low, axis.high, axis.image_dilation - 1), strict=True):
                amount[place] = n
    return b.pad(x, 0, *amounts)
