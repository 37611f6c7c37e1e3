"""The rule of convolutions: window pieces side by side (patches), then one dot.

Along each spatial axis the pieces are cut in the cheaper of two ways. Few window positions (an ordinary kernel): one strided slice per
window position, joined along the channels. Few output positions (the gradient of a kernel, whose window is the whole image): one
slice per output position, joined along the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpuflow.lower.frontend.registry import lowers
from tpuflow.lower.frontend.rules.linear import convert_result, operands, result_dtype
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value


@dataclass(frozen=True, slots=True)
class _Axis:
    """One spatial axis: window positions and output positions, and which of the two is cut out slice by slice."""

    window: int
    out: int
    stride: int
    dilation: int

    @property
    def by_window(self) -> bool:
        return self.window <= self.out

    def slices(self) -> list[tuple[int, int, int]]:
        """(start, limit, stride) of every slice."""
        if self.by_window:
            reach, step = (self.out - 1) * self.stride + 1, self.stride
            return [(k * self.dilation, k * self.dilation + reach, step) for k in range(self.window)]
        reach, step = (self.window - 1) * self.dilation + 1, self.dilation
        return [(o * self.stride, o * self.stride + reach, step) for o in range(self.out)]


@lowers("conv_general_dilated")
def _conv_general_dilated(
    b: Builder, lhs: Value, rhs: Value, *,
    window_strides: Sequence[int], padding: Sequence[tuple[int, int]], lhs_dilation: Sequence[int], rhs_dilation: Sequence[int],
    dimension_numbers: Any, feature_group_count: int, batch_group_count: int, preferred_element_type: Any,
) -> Value:  # fmt: skip
    result = result_dtype(lhs, rhs, preferred_element_type)
    lhs, rhs = operands(b, lhs, rhs, result)
    lhs_spec, rhs_spec, out_spec = dimension_numbers
    image = b.transpose(lhs, (lhs_spec[0], *lhs_spec[2:], lhs_spec[1]))  # [N, S..., C]
    kernel = b.transpose(rhs, (*rhs_spec[2:], rhs_spec[1], rhs_spec[0]))  # [W..., C / groups, O]
    image = _padded(b, image, padding, lhs_dilation)
    axes = _axes(image.shape[1:-1], kernel.shape[:-2], window_strides, rhs_dilation)
    if batch_group_count > 1:
        out = _dot_patches(b, image, kernel, axes, batch_groups=batch_group_count)
    else:
        out = _dot_patches(b, image, kernel, axes, feature_groups=feature_group_count)
    # [N, S..., O] -> the axes' places in out_spec
    source = {out_spec[0]: 0, out_spec[1]: len(out_spec) - 1, **{place: 1 + i for i, place in enumerate(out_spec[2:])}}
    return convert_result(b, b.transpose(out, [source[i] for i in range(len(out_spec))]), result)


def _padded(b: Builder, image: Value, padding: Sequence[tuple[int, int]], dilation: Sequence[int]) -> Value:
    low, high = ([0, *(p[side] for p in padding), 0] for side in (0, 1))
    return b.pad(image, 0, low, high, [0, *(d - 1 for d in dilation), 0])


def _axes(sizes: Sequence[int], windows: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> list[_Axis]:
    axes = []
    for size, window, stride, dilation in zip(sizes, windows, strides, dilations, strict=True):
        room = size - ((window - 1) * dilation + 1 if window else 0)
        axes.append(_Axis(window, max(0, room // stride + 1), stride, dilation))
    return axes


def _dot_patches(
    b: Builder, image: Value, kernel: Value, axes: Sequence[_Axis], *, feature_groups: int = 1, batch_groups: int = 1
) -> Value:
    """[N, S..., C] with [W..., C / groups, O] -> [N / batch groups, out..., O].

    The dot sees four groups of axes: g (the groups), m (output positions, images), k (window positions, channels), o (output features).
    """
    groups = feature_groups * batch_groups
    images, channels = image.shape[0] // batch_groups, image.shape[-1] // feature_groups
    features = kernel.shape[-1] // groups
    outs = [a.out for a in axes]
    if 0 in (*image.shape, *kernel.shape, *outs):
        return b.full_like(b.splat(b.scalar(0, kernel.dtype), (images, *outs, kernel.shape[-1])), 0)
    patches = _patches(b, image, axes)
    in_batch = [i for i, a in enumerate(axes) if not a.by_window][::-1]  # the axis cut last is outermost
    in_channels = [i for i, a in enumerate(axes) if a.by_window][::-1]
    labelled = [
        *((axes[i].out, "m") for i in in_batch), (batch_groups, "g"), (images, "m"),
        *((a.out, "m") if a.by_window else (a.window, "k") for a in axes),
        (math.prod(axes[i].window for i in in_channels), "k"), (feature_groups, "g"), (channels, "k"),
    ]  # fmt: skip
    lhs = _grouped(b, patches, labelled, "gmk")
    order = [*in_batch[::-1], *in_channels]
    weights = b.transpose(kernel, (*order, len(axes), len(axes) + 1))
    rhs = _grouped(b, weights, [(math.prod(weights.shape[:-1]), "k"), (groups, "g"), (features, "o")], "gko")
    dot = b.dot(lhs, rhs, (2,), (1,), (0,), (0,)) if groups > 1 else _plain_dot(b, lhs, rhs)
    # m: the batch-cut output axes, images, the channel-cut output axes in order
    places = [*in_batch, -1, *sorted(in_channels)]
    sizes = [axes[i].out if i >= 0 else images for i in places]
    laid = b.transpose(b.reshape(dot, (groups, math.prod(sizes), features)), (1, 0, 2)) if groups > 1 else dot
    out = b.reshape(laid, (*sizes, groups * features))
    return b.transpose(out, (*(places.index(i) for i in range(-1, len(axes))), len(places)))


def _plain_dot(b: Builder, lhs: Value, rhs: Value) -> Value:
    return b.dot(b.reshape(lhs, lhs.shape[1:]), b.reshape(rhs, rhs.shape[1:]), (1,), (0,))


def _patches(b: Builder, image: Value, axes: Sequence[_Axis]) -> Value:
    """[N, S..., C] -> [outs cut, N, (out | window)..., windows cut x C], the axis cut last outermost in its group."""
    for i, axis in enumerate(axes):
        parts = [b.slice_axis(image, 1 + i, *cut) for cut in axis.slices()]
        image = b.concatenate(parts, len(image.shape) - 1 if axis.by_window else 0)
    return image


def _grouped(b: Builder, x: Value, labelled: Sequence[tuple[int, str]], order: str) -> Value:
    """x seen as axes of the given sizes, those of one label brought together: one axis for each letter of `order`."""
    kept = [(n, label) for n, label in labelled if n > 1]
    split = b.reshape(x, [n for n, _ in kept])
    permutation = [i for letter in order for i, (_, label) in enumerate(kept) if label == letter]
    sizes = [math.prod(n for n, label in kept if label == letter) for letter in order]
    return b.reshape(b.transpose(split, permutation), sizes)
