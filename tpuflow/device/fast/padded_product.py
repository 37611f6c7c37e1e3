"""A product of padded operands in NumPy, for the rare case that zeros of the padding meet infinities or NaN: called out of XLA executables.

It is the reference engine's product, which takes the padding by masks. XLA would have to compile this for each product of a program by
itself, a third of the time that it takes for a convolutional network's step, for what most programs never come to.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tpuflow.dtypes import F16, F32, DType
from tpuflow.isa import numpy_matmul
from tpuflow.isa.contraction import Contraction, SlidingAxis
from tpuflow.isa.numpy_rounding import widen
from tpuflow.jaxprs.foreign_calls import foreign_call

Array = np.ndarray[Any, Any]

MOST_FACTORS = 1 << 23
"""Numbers of an operand, as patches, at once: a bit-exact product makes some ten arrays of so many in float64."""


def stretch(n: int, reach: int, zeros: int) -> tuple[int, int, tuple[int, int]]:
    """What patches that reach so far see of an axis of n elements after `zeros` zeros (fewer than none leave out the first elements):
    (first, last) elements, and the zeros before and after them."""
    first = min(max(0, -zeros), n)
    last = min(max(reach - zeros, first), n)
    low = min(max(0, zeros), reach)
    return first, last, (low, reach - low - (last - first))


def described(
    whole: Contraction, sizes: Mapping[int, int], shape: Sequence[int], lengths: Sequence[int], low_padding: Sequence[int], *, exact: bool
) -> str:
    """A product as the text of a foreign call; sizes: of the labels of sliding axes; shape: of the result, which may have axes merged;
    lengths and low padding of each sliding axis, as `stretch` takes them. exact: its sums are the matrix unit's, else of f32 in any order.
    """
    sliding = [dataclasses.astuple(s) for s in whole.sliding]
    seen = [
        (s.reach(sizes[whole.lhs[s.axis]], sizes[s.label]), n, zeros)
        for s, n, zeros in zip(whole.sliding, lengths, low_padding, strict=True)
    ]
    used = [(label, sizes[label]) for outer, s in whole.outer.items() for label in (outer, s.label)]
    labels = {"lhs": whole.lhs, "rhs": whole.rhs, "out": whole.out, "sliding": sliding}
    fields = labels | {"sizes": used, "shape": shape, "seen": seen, "exact": exact}
    return json.dumps(fields)


def _padded_product(text: str, a: Array, b: Array, a_mask: Array, b_mask: Array) -> Array:
    """f32: the product of float carriers: of what patches see of `a`, and b. Masks broadcast to the whole operands, true at elements."""
    fields = json.loads(text)
    lhs, rhs, out = (tuple(fields[side]) for side in ("lhs", "rhs", "out"))
    whole, sizes = Contraction(lhs, rhs, out, tuple(SlidingAxis(*s) for s in fields["sliding"])), dict(fields["sizes"])
    lengths = {s.axis: n for s, (_, n, _) in zip(whole.sliding, fields["seen"], strict=True)}
    a_mask = np.broadcast_to(a_mask, [lengths.get(axis, n) for axis, n in enumerate(a.shape)])
    for s, (reach, n, zeros) in zip(whole.sliding, fields["seen"], strict=True):
        first, last, around = stretch(n, reach, zeros)
        margins = [around if axis == s.axis else (0, 0) for axis in range(a.ndim)]
        a_mask = np.pad(a_mask[(*(slice(None),) * s.axis, slice(first, last))], margins)
        a = np.pad(a, margins)

    def multiply(x: Array, y: Array, dtype: DType | None = None) -> Array:
        return _in_parts(whole.patches(x, sizes, numpy_matmul.patches), y, whole.of_patches(), dtype)

    dtype = F16 if a.dtype == np.float16 else F32
    with np.errstate(all="ignore"):
        product = multiply(numpy_matmul.finite(a), numpy_matmul.finite(b), dtype if fields["exact"] else None)
        sums = numpy_matmul.non_finite_sums(widen(a, dtype), widen(b, dtype), a_mask, b_mask, multiply)
        return numpy_matmul.with_non_finite(product, sums).reshape(fields["shape"])


padded_product = foreign_call("tpuflow.padded_product", _padded_product)
"""(text of `described`, type of the result, a, b, mask of a, mask of b) -> the product, traced; a: the elements that patches see."""


def _in_parts(a: Array, b: Array, product: Contraction, dtype: DType | None) -> Array:
    """The product of finite numbers, the matrix unit's sums of a type or sums of f32 in any order; large operands are cut along labels of
    the result."""
    lengths = product.by_label(a.shape, b.shape)
    for x, labels in ((a, product.lhs), (b, product.rhs)):
        free = max((label for label in labels if label in product.out), key=lengths.__getitem__, default=None)
        if x.size > MOST_FACTORS and free is not None and lengths[free] > 1:
            half = lengths[free] // 2
            pieces = slice(0, half), slice(half, None)
            parts = [_in_parts(_cut(a, product.lhs, free, at), _cut(b, product.rhs, free, at), product, dtype) for at in pieces]
            return np.concatenate(parts, product.out.index(free))
    return numpy_matmul.unordered_matmul(a, b, product) if dtype is None else numpy_matmul.matmul(a, b, product, dtype, F32)


def _cut(x: Array, labels: Sequence[int], label: int, piece: slice) -> Array:
    return x[(*(slice(None),) * labels.index(label), piece)] if label in labels else x
