"""Convolutions: one product with labelled axes, in which every spatial axis of the image carries two labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tpuflow.dtypes import F32, S32, DType
from tpuflow.isa.bounds import Bound
from tpuflow.isa.contraction import Contraction, SlidingAxis
from tpuflow.isa.instruction import MAX_RANK
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import TensorType, Value
from tpuflow.lower.graph.products import DEFAULT
from tpuflow.lower.operations.products import convert_result, operands, result_dtype
from tpuflow.lower.operations.window import SlidingWindow, WindowDimension

_Named = tuple[tuple[int, int], ...]  # the axes that an axis is split into, major first: (label, length)

IMAGE, CHANNEL, FEATURE, GROUP, SPATIAL = range(5)


@dataclass(frozen=True, slots=True)
class ConvAxes:
    """Which axes of operands and result are what: image (batch, feature, spatial...), kernel (output feature, input feature, spatial...),
    result as the image."""

    image: tuple[int, ...]
    kernel: tuple[int, ...]
    out: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Axis(WindowDimension):
    """Spatial axis number `number`; its `base_dilation` is the image's (lhs) dilation, its `window_dilation` the kernel's (rhs)."""

    number: int = 0

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
    def meets(self) -> bool:
        """False only if a kernel of one position meets no element of the image at its single output: then the result is zero."""
        element, between = divmod(-self.low, self.base_dilation)
        return self.window > 1 or self.out > 1 or (between == 0 and 0 <= element < self.size)

    @property
    def is_plain(self) -> bool:
        """Whether the convolution along this axis is pointwise: output position i reads image position i only."""
        return (self.window, self.stride, self.low, self.high, self.base_dilation) == (1, 1, 0, 0, 1)

    @property
    def is_base_dilated(self) -> bool:
        """Whether a pointwise kernel meets a base-dilated image: the product skips the zeros, which are padded into its result."""
        return self.window == self.stride == 1 and self.base_dilation > 1 and self.out > 0

    @property
    def has_phases(self) -> bool:
        """Whether a base-dilated image (the gradient of a strided convolution) becomes `base_dilation` phases of an undilated one."""
        return self.stride == self.window_dilation == 1 and 1 < self.base_dilation < self.out and self.window > 1


def convolution(
    b: Builder, lhs: Value, rhs: Value, places: ConvAxes, window: SlidingWindow, *,
    feature_groups: int = 1, batch_groups: int = 1, precision: str = DEFAULT, preferred: DType | None = None,
) -> Value:  # fmt: skip
    """The image lhs under the kernel rhs, in the preferred type, or else the operands' common one; `window` is of the spatial axes."""
    result = result_dtype(lhs, rhs, preferred)
    lhs, rhs = operands(b, lhs, rhs, result)
    spatial = window.axes([lhs.shape[i] for i in places.image[2:]], _Axis)
    axes = [replace(axis, number=number) for number, axis in enumerate(spatial)]
    narrow = [replace(a, low=0, high=0, base_dilation=1) if a.is_base_dilated else a for a in axes]
    product = _product(b, lhs, rhs, narrow, places, (batch_groups, feature_groups), precision)
    dilated = [(place, a) for place, a in zip(places.out[2:], axes, strict=True) if a.is_base_dilated]
    return _dilated(b, convert_result(b, product, result), dilated)  # what is dilated is stored in its own type


def _product(b: Builder, lhs: Value, rhs: Value, axes: Sequence[_Axis], places: ConvAxes, groups: tuple[int, int], precision: str) -> Value:
    """The convolution, its axes in their places in the result."""
    image, kernel, out = places.image, places.kernel, places.out
    batch_groups, feature_groups = groups
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
    lhs, rhs = (_split(b, x, names) for x, names in ((lhs, left), (rhs, right)))
    (lhs_labels, _), (rhs_labels, _), (out_labels, lengths) = map(_named, (left, right, made))
    rhs = b.reverse(rhs, [rhs_labels.index(a.phase) for a in phased])
    sliding = {a: _sliding(a, lhs_labels.index(a.outer), phased=a in phased) for a in axes if not a.is_plain}
    bounds = (*(_read(a, s, phased=a in phased) for a, s in sliding.items()), *(_bound(a) for a in phased))
    product = b.conv(lhs, rhs, Contraction(lhs_labels, rhs_labels, out_labels, tuple(sliding.values()), bounds), lengths, precision)
    product = b.reshape(product, [math.prod(n for _, n in made[place]) for place in sorted(made)])
    return b.slice(product, [0] * len(whole.shape), whole.shape)


def _phases(b: Builder, rhs: Value, place: int, a: _Axis) -> tuple[Value, _Named, _Named]:
    """The kernel padded to whole turns of the phases, the names of its axis and of the output's.

    Output s q + p meets kernel position r at image element (s q + p + r - low) / s, where that is whole. With r = s t + m - p and
    m = low mod s it is q + t - floor(low / s), whatever the phase p: all phases are outputs of one product with a kernel [t, s - 1 - p].
    """
    s, low = a.base_dilation, _padding(a)
    turns = -(-(a.window + low) // s)
    amounts = [[n if axis == place else 0 for axis in range(len(rhs.shape))] for n in (low, turns * s - low - a.window)]
    return b.pad(rhs, 0, *amounts), ((a.inner, turns), (a.phase, s)), ((a.outer, -(-a.out // s)), (a.phase, s))


def _padding(a: _Axis) -> int:
    """Zeros before the kernel."""
    return a.base_dilation - 1 - a.low % a.base_dilation


def _bound(a: _Axis) -> Bound:
    """Where the kernel of all phases has elements: at turn t of phase p it is at s t + s - 1 - p of the padded axis."""
    s = a.base_dilation
    return Bound(a.window, ((a.inner, s), (a.phase, -1)), s - 1 - _padding(a))


def _sliding(a: _Axis, axis: int, *, phased: bool) -> SlidingAxis:
    """How axis `axis` of the image slides."""
    return SlidingAxis(axis, a.inner) if phased else SlidingAxis(axis, a.inner, a.stride, a.window_dilation)


def _read(a: _Axis, sliding: SlidingAxis, *, phased: bool) -> Bound:
    """Which elements of the image it reads."""
    low, interior = (a.low // a.base_dilation, 1) if phased else (a.low, a.base_dilation)
    return sliding.bound(a.outer, a.size, low, interior)


def _named(names: dict[int, _Named]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(labels, lengths) of the axes that an array's axes are split into."""
    pairs = [pair for place in sorted(names) for pair in names[place]]
    return tuple(label for label, _ in pairs), tuple(n for _, n in pairs)


def _split(b: Builder, x: Value, names: dict[int, _Named]) -> Value:
    return b.reshape(x, _named(names)[1])


def _dilated(b: Builder, x: Value, axes: Sequence[tuple[int, _Axis]]) -> Value:
    """x with zeros around and between its elements along the axes at the given places."""
    low, high, interior = ([0] * len(x.shape) for _ in range(3))
    for place, a in axes:
        low[place], high[place], interior[place] = a.low, a.high, a.base_dilation - 1
    return b.pad(x, 0, low, high, interior)
