"""Products whose left operand has axes with two labels: one XLA convolution, the operand's patches times the right operand, or elementwise.

XLA:CPU runs a convolution through Eigen only when its operands lie as [N, spatial, C] and [spatial, C, O], and inside loops it does not
turn others so: a weight gradient as JAX writes it is up to 100 times slower in a loop than outside. Turned by hand it is as fast in
loops as outside. What is chosen (`_is_convolution`), measured on LeNet, the CIFAR-10 network and ResNet-50, forward and both gradients:
the convolution, but patches where the images have a single channel (2.6 times faster then; the gradient of the weights shares the
forward product's patches), and where the arithmetic is not native f32. Depthwise convolutions, in which each channel meets a window of its
own, are elementwise products, one for each position of the window: XLA:CPU makes one loop of their sum, which takes 0.6 ms for images of
[8, 32, 32, 64] and windows of 3x3, instead of 15 as a convolution.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.device.fast import lax_matmul
from tpuflow.device.fast.lane_by_lane import convolution
from tpuflow.device.fast.lax_reduce import summed
from tpuflow.device.fast.lax_rounding import Rounding, materialized, widen
from tpuflow.device.fast.padded_product import stretch
from tpuflow.dtypes import DType
from tpuflow.isa.contraction import Contraction

Value = Any
Axes = Sequence[int]
Correct = Callable[[Value, Value, Value, Contraction], Value]
"""(product, its operands, their labels and the product's) -> the product without the products of the padding."""

MOST_SPATIAL = 3  # axes of a convolution that XLA:CPU hands to Eigen
LEAST_CHANNELS = 2  # of images that are worth a convolution
MOST_POSITIONS = 16  # of a window, each of which is a product by itself: XLA compiles the sum of 25 twice as long as patches


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
    rounding: Rounding, a: Value, b: Value, whole: Contraction, low_padding: Sequence[int], sizes: Mapping[int, int], dtype: DType,
    acc: DType, correct: Correct,
) -> Value:  # fmt: skip
    """See `LaxArithmetic.convolve`; low_padding may be negative, which leaves out so many of the first elements. `correct` is given the
    product and the operands as they lie, `a` without padding."""
    if not whole.sliding:
        return correct(lax_matmul.matmul(rounding, a, b, whole, dtype, acc), a, b, whole)
    a, around = _stretch(a, whole, low_padding, sizes)
    lengths = dict(zip(whole.lhs, a.shape, strict=True)) | dict(zip(whole.rhs, b.shape, strict=True)) | dict(sizes)
    by_window = all(lengths[s.label] <= lengths[x] for x, s in whole.outer.items())
    if rounding.bitexact or not dtype.is_float:
        patches, product = _patched(_padded(a, around), whole, sizes, by_window=by_window)
        return correct(lax_matmul.matmul(rounding, patches, b, product, dtype, acc), a, b, whole)
    a, b = widen(a, dtype), widen(b, dtype)
    if _is_depthwise(whole, lengths):
        return correct(_depthwise(_padded(a, around), b, whole, lengths), a, b, whole)
    if _is_convolution(whole, lengths, by_window=by_window):
        return _convolution(a, b, whole, around, sizes, correct)
    patches, product = _patched(_padded(a, around), whole, sizes, by_window=by_window)
    if by_window:
        return correct(lax_matmul.of_matrices(patches, b, product), a, b, whole)
    turned = Contraction(product.rhs, product.lhs, product.out)  # patches on the right are not turned
    return correct(lax_matmul.of_matrices(b, patches, turned), a, b, whole)


def _stretch(a: Value, whole: Contraction, low_padding: Sequence[int], sizes: Mapping[int, int]) -> tuple[Value, list[tuple[int, int]]]:
    """The elements that the patches see, and how many zeros they see before and after them along each axis."""
    around = [(0, 0)] * a.ndim
    for s, zeros in zip(whole.sliding, low_padding, strict=True):
        reach, n = s.reach(sizes[whole.lhs[s.axis]], sizes[s.label]), a.shape[s.axis]
        first, last, around[s.axis] = stretch(n, reach, zeros)
        if (first, last) != (0, n):
            a = lax.slice_in_dim(a, first, last, 1, s.axis)
    return a, around


def _padded(a: Value, around: Sequence[tuple[int, int]]) -> Value:
    return lax.pad(a, np.zeros((), a.dtype), [(*margins, 0) for margins in around]) if any(map(any, around)) else a


def _patched(a: Value, whole: Contraction, sizes: Mapping[int, int], *, by_window: bool) -> tuple[Value, Contraction]:
    """The left operand with an axis for each label, positions and windows in the order of the forward product and the gradient, and their
    product with the right one. A gradient's windows are cut as the forward product's are."""
    labels = list(whole.lhs)
    for outer, s in reversed(whole.outer.items()):
        inner, steps = s.label, (s.stride, s.dilation)
        if sizes[outer] < sizes[inner] and {outer, inner} & set(whole.out):
            outer, inner, steps = inner, outer, (s.dilation, s.stride)
        a = patches(a, s.axis, sizes[outer], sizes[inner], *steps)
        labels[s.axis : s.axis + 1] = [outer, inner]
    order = sorted(labels, key=lambda x: (x in whole.out) != by_window)
    return lax.transpose(a, [labels.index(x) for x in order]), Contraction(tuple(order), whole.rhs, whole.out)


def _images(whole: Contraction) -> tuple[int, ...]:
    """Rows that do not slide, in the left operand's order."""
    rows, outer = whole.rows, whole.outer
    return tuple(x for x in whole.lhs if x in rows and x not in outer)


def _channels(whole: Contraction) -> tuple[int, ...]:
    """Contracted labels that do not slide, in the left operand's order."""
    contracted, outer = whole.contracted, whole.outer
    return tuple(x for x in whole.lhs if x in contracted and x not in outer)


def _is_convolution(whole: Contraction, lengths: Mapping[int, int], *, by_window: bool) -> bool:
    """Whether this is one for XLA, and quicker as such. lengths: of every label; by_window: else of the gradient of a window's weights."""
    slides = all(x in whole.rows and s.label in whole.contracted for x, s in whole.outer.items())
    depth = math.prod(lengths[x] for x in (_channels(whole) if by_window else _images(whole)))
    return slides and len(whole.sliding) <= MOST_SPATIAL and depth >= LEAST_CHANNELS and all(lengths[x] for x in whole.outer)


def _convolution(
    a: Value, b: Value, whole: Contraction, around: Sequence[tuple[int, int]], sizes: Mapping[int, int], correct: Correct
) -> Value:
    """[N, spatial, G C] with [spatial, C, G O] -> [N, spatial, G O], each group of labels brought together and merged."""
    a, b = materialized(a), materialized(b)
    sliding, outer = tuple(whole.outer.values()), tuple(whole.outer)
    length = dict(zip(whole.lhs, a.shape, strict=True)) | dict(zip(whole.rhs, b.shape, strict=True))
    images, channels = _images(whole), _channels(whole)
    groups, features = tuple(x for x in whole.lhs if x in whole.batch), tuple(x for x in whole.rhs if x in whole.columns)
    left, right = (*images, *outer, *groups, *channels), (*(s.label for s in sliding), *channels, *groups, *features)
    x = _merged(_turned(a, whole.lhs, left), [len(images), *[1] * len(outer), len(groups) + len(channels)])
    y = _merged(_turned(b, whole.rhs, right), [*[1] * len(outer), len(channels), len(groups) + len(features)])
    spatial = "".join(itertools.islice("DHW", len(sliding)))
    product = convolution(
        x, y, [s.stride for s in sliding], [around[s.axis] for s in sliding], rhs_dilation=[s.dilation for s in sliding],
        dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"), feature_group_count=math.prod(length[x] for x in groups),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    order = (*images, *outer, *groups, *features)
    product = correct(product, a, b, replace(whole, out=order))
    product = lax.reshape(product, [sizes[x] if x in whole.outer else length[x] for x in order])
    return lax.transpose(product, [order.index(x) for x in whole.out])


def _is_depthwise(whole: Contraction, lengths: Mapping[int, int]) -> bool:
    """Whether a group has one channel and one feature, and windows have few positions (the shorter labels are of these)."""
    window = [min(x, s.label, key=lambda label: lengths[label]) for x, s in whole.outer.items()]
    channels = _channels(whole) if set(window) <= set(whole.contracted) else _images(whole)
    alone = all(lengths[x] == 1 for x in (*channels, *whole.columns))
    return alone and all(lengths.values()) and math.prod(lengths[x] for x in window) <= MOST_POSITIONS


def _depthwise(a: Value, b: Value, whole: Contraction, lengths: Mapping[int, int]) -> Value:
    """The padded a times b, one position of the window after the other, along one sliding axis after the other."""
    if not whole.sliding:
        return _by_element(a, b, whole)
    s, *others = whole.sliding
    (short, step), (long, stride) = sorted(s.terms(whole.lhs[s.axis]), key=lambda term: lengths[term[0]])
    lhs = (*whole.lhs[: s.axis], long, *whole.lhs[s.axis + 1 :])
    rhs, out = (tuple(x for x in labels if x != short) for labels in (whole.rhs, whole.out))
    rest = Contraction(lhs, rhs, out, tuple(others))

    def at(position: int) -> Value:
        start = position * step
        x = lax.slice_in_dim(a, start, start + (lengths[long] - 1) * stride + 1, stride, s.axis)
        y = lax.index_in_dim(b, position, whole.rhs.index(short), keepdims=False) if short in whole.rhs else b
        return _depthwise(x, y, rest, lengths)

    products = [at(position) for position in range(lengths[short])]
    return jnp.stack(products, whole.out.index(short)) if short in whole.out else functools.reduce(lax.add, products)


def _by_element(a: Value, b: Value, whole: Contraction) -> Value:
    """A product whose right operand has no columns, but for axes of length 1: of the elements, then summed."""
    own, columns = [x for x in whole.lhs if x in whole.rhs], [whole.rhs.index(x) for x in whole.columns]
    factor = lax.transpose(b, [*(whole.rhs.index(x) for x in own), *columns]).reshape([a.shape[whole.lhs.index(x)] for x in own])
    products = lax.mul(a, lax.broadcast_in_dim(factor, a.shape, [whole.lhs.index(x) for x in own]))
    axes = [axis for axis, x in enumerate(whole.lhs) if x not in whole.out]
    total = lax.squeeze(summed(products, axes, from_zero=True, in_memory=False), axes)
    kept = [x for x in whole.lhs if x in whole.out]
    turned = lax.transpose(total, [kept.index(x) for x in whole.out if x in kept])
    return lax.expand_dims(turned, [whole.out.index(x) for x in whole.columns])


def _turned(x: Value, labels: Axes, order: Axes) -> Value:
    return lax.transpose(x, [list(labels).index(label) for label in order])


def _merged(x: Value, counts: Sequence[int]) -> Value:
    """x with each so many axes made one (of size 1 for none)."""
    starts = itertools.accumulate(counts, initial=0)
    return lax.reshape(x, [math.prod(x.shape[start : start + n]) for start, n in zip(starts, counts, strict=False)])
