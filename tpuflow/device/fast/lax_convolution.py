"""Products whose left operand has axes with two labels: one XLA convolution, or the operand's patches times the right operand.

XLA:CPU runs a convolution through Eigen only when its operands lie as [N, spatial, C] and [spatial, C, O], and inside loops it does not
turn others so: a weight gradient as JAX writes it is up to 100 times slower in a loop than outside. Turned by hand it is as fast in
loops as outside. What is chosen (`_is_convolution`), measured on LeNet, the CIFAR-10 network and ResNet-50, forward and both gradients:
the convolution, but patches where the images have a single channel (2.6 times faster then; the gradient of the weights shares the
forward product's patches), and where the arithmetic is not native f32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.device.fast import lax_matmul
from tpuflow.device.fast.lax_rounding import Rounding, widen
from tpuflow.dtypes import DType
from tpuflow.isa.instruction import Pair

Value = Any
Axes = Sequence[int]

MOST_SPATIAL = 3  # axes of a convolution that XLA:CPU hands to Eigen
LEAST_CHANNELS = 2  # of images that are worth a convolution


def patches(a: Value, axis: int, outer: int, inner: int, stride: int, dilation: int) -> Value:
    """See `Arithmetic.patches`: slices of the axis side by side, one for each position of the shorter label."""
    by_inner = inner <= outer
    count, length = (inner, outer) if by_inner else (outer, inner)
    start, step = (dilation, stride) if by_inner else (stride, dilation)
    if 0 in (outer, inner):
        return lax.full((*a.shape[:axis], outer, inner, *a.shape[axis + 1 :]), 0, a.dtype)
    cuts = [lax.slice_in_dim(a, k * start, k * start + (length - 1) * step + 1, step, axis) for k in range(count)]
    where = axis + 1 if by_inner else axis
    return lax.concatenate([lax.expand_dims(cut, (where,)) for cut in cuts], where)


def convolve(
    rounding: Rounding, a: Value, b: Value, a_axes: Axes, b_axes: Axes, out_axes: Axes, pairs: Sequence[Pair], before: Sequence[int],
    sizes: Mapping[int, int], dtype: DType, acc: DType,
) -> Value:  # fmt: skip
    """See `LaxArithmetic.convolve`; before: zeros before the axis of each pair, or if negative how many of its elements are left out."""
    if not pairs:
        return lax_matmul.matmul(rounding, a, b, a_axes, b_axes, out_axes, dtype, acc)
    roles = _Roles.of(a_axes, b_axes, out_axes, pairs)
    a, around = _stretch(a, a_axes, pairs, before, sizes)
    lengths = dict(zip(a_axes, a.shape, strict=True)) | dict(zip(b_axes, b.shape, strict=True)) | dict(sizes)
    if dtype.is_float and not rounding.bitexact and roles.is_convolution(lengths):
        return _convolution(widen(a, dtype), widen(b, dtype), roles, around, a_axes, b_axes, out_axes, sizes)
    if any(map(any, around)):
        a = lax.pad(a, np.zeros((), a.dtype), [(*margins, 0) for margins in around])
    by_window = roles.by_window(lengths)
    a, labels = _patched(a, a_axes, out_axes, pairs, sizes)
    order = sorted(labels, key=lambda x: (x in out_axes) != by_window)  # positions, then windows: the forward product's and the gradient's
    a = lax.transpose(a, [labels.index(x) for x in order])
    if rounding.bitexact or not dtype.is_float:
        return lax_matmul.matmul(rounding, a, b, order, b_axes, out_axes, dtype, acc)
    a, b = widen(a, dtype), widen(b, dtype)
    if by_window:
        return lax_matmul.of_matrices(a, b, order, b_axes, out_axes)
    return lax_matmul.of_matrices(b, a, b_axes, order, out_axes)  # patches on the right are not turned


def _stretch(
    a: Value, a_axes: Axes, pairs: Sequence[Pair], before: Sequence[int], sizes: Mapping[int, int]
) -> tuple[Value, list[tuple[int, int]]]:
    """The elements that the patches see, and how many zeros they see before and after them along each axis."""
    around = [(0, 0)] * a.ndim
    for p, zeros in zip(pairs, before, strict=True):
        reach, n = p.reach(sizes[a_axes[p.axis]], sizes[p.label]), a.shape[p.axis]
        first = min(max(0, -zeros), n)
        last = min(max(reach - zeros, first), n)
        if (first, last) != (0, n):
            a = lax.slice_in_dim(a, first, last, 1, p.axis)
        low = min(max(0, zeros), reach)
        around[p.axis] = low, reach - low - (last - first)
    return a, around


def _patched(a: Value, a_axes: Axes, out_axes: Axes, pairs: Sequence[Pair], sizes: Mapping[int, int]) -> tuple[Value, list[int]]:
    """The left operand with an axis for each label, and its labels. A gradient's windows are cut as the forward product's are."""
    labels = list(a_axes)
    for p in sorted(pairs, key=lambda p: -p.axis):
        outer, inner, steps = labels[p.axis], p.label, (p.stride, p.dilation)
        if sizes[outer] < sizes[inner] and {outer, inner} & set(out_axes):
            outer, inner, steps = inner, outer, (p.dilation, p.stride)
        a = patches(a, p.axis, sizes[outer], sizes[inner], *steps)
        labels[p.axis : p.axis + 1] = [outer, inner]
    return a, labels


@dataclass(frozen=True, slots=True)
class _Roles:
    """The labels of a convolution by what they are to XLA; `pairs` by their outer labels, in the order of the left operand's axes."""

    images: tuple[int, ...]
    groups: tuple[int, ...]
    channels: tuple[int, ...]
    features: tuple[int, ...]
    pairs: Mapping[int, Pair]
    slides: bool

    @classmethod
    def of(cls, a_axes: Axes, b_axes: Axes, out_axes: Axes, pairs: Sequence[Pair]) -> _Roles:
        """Roles from which of the operands and the result a label is in."""
        a, b, out = set(a_axes), set(b_axes), set(out_axes)
        paired = {a_axes[p.axis]: p for p in sorted(pairs, key=lambda p: p.axis)}
        inner = {p.label for p in pairs}
        slides = all(x in out and x not in b for x in paired) and not inner & out and inner <= b
        return cls(
            tuple(x for x in a_axes if x in out and x not in b and x not in paired),
            tuple(x for x in a_axes if x in out and x in b),
            tuple(x for x in a_axes if x not in out and x not in paired),
            tuple(x for x in b_axes if x not in a and x not in inner),
            paired,
            slides,
        )

    def by_window(self, lengths: Mapping[int, int]) -> bool:
        """Whether the sum is over a window; else this is the gradient of a window's weights. lengths: of every label."""
        return all(lengths[p.label] <= lengths[x] for x, p in self.pairs.items())

    def is_convolution(self, lengths: Mapping[int, int]) -> bool:
        """Whether this is one for XLA, and quicker as such. lengths: of every label."""
        depth = math.prod(lengths[x] for x in (self.channels if self.by_window(lengths) else self.images))
        return self.slides and len(self.pairs) <= MOST_SPATIAL and depth >= LEAST_CHANNELS and all(lengths[x] for x in self.pairs)


def _convolution(
    a: Value,
    b: Value,
    roles: _Roles,
    around: Sequence[tuple[int, int]],
    a_axes: Axes,
    b_axes: Axes,
    out_axes: Axes,
    sizes: Mapping[int, int],
) -> Value:
    """[N, spatial, G C] with [spatial, C, G O] -> [N, spatial, G O], each group of labels brought together and merged."""
    pairs, outer = tuple(roles.pairs.values()), tuple(roles.pairs)
    length = dict(zip(a_axes, a.shape, strict=True)) | dict(zip(b_axes, b.shape, strict=True))
    image, kernel = (roles.images, *((x,) for x in outer), (*roles.groups, *roles.channels)), tuple((p.label,) for p in pairs)
    lhs = _merged(a, a_axes, image)
    rhs = _merged(b, b_axes, (*kernel, roles.channels, (*roles.groups, *roles.features)))
    spatial = "".join(itertools.islice("DHW", len(pairs)))
    product = lax.conv_general_dilated(
        lhs, rhs, [p.stride for p in pairs], [around[p.axis] for p in pairs], rhs_dilation=[p.dilation for p in pairs],
        dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"), feature_group_count=math.prod(length[x] for x in roles.groups),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    order = (*roles.images, *outer, *roles.groups, *roles.features)
    product = lax.reshape(product, [sizes[x] if x in roles.pairs else length[x] for x in order])
    return lax.transpose(product, [order.index(x) for x in out_axes])


def _merged(x: Value, axes: Axes, groups: Sequence[tuple[int, ...]]) -> Value:
    """x with an axis for every group of labels (of size 1 for an empty one)."""
    length = dict(zip(axes, x.shape, strict=True))
    turned = lax.transpose(x, [list(axes).index(label) for group in groups for label in group])
    return lax.reshape(turned, [math.prod(length[label] for label in group) for group in groups])
