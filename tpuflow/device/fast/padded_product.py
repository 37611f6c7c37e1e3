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

from tpuflow.dtypes import F16, F32
from tpuflow.isa import numpy_matmul
from tpuflow.isa.contraction import Contraction, SlidingAxis
from tpuflow.jaxprs.foreign_calls import foreign_call

Array = np.ndarray[Any, Any]

MOST_FACTORS = 1 << 25
"""Numbers of an operand, as patches, at once: the product makes some ten arrays of so many."""


def stretch(n: int, reach: int, zeros: int) -> tuple[int, int, tuple[int, int]]:
    """What patches that reach so far see of an axis of n elements after `zeros` zeros (fewer than none leave out the first elements):
    (first, last) elements, and the zeros before and after them."""
    first = min(max(0, -zeros), n)
    last = min(max(reach - zeros, first), n)
    low = min(max(0, zeros), reach)
    return first, last, (low, reach - low - (last - first))


def described(whole: Contraction, sizes: Mapping[int, int], lengths: Sequence[int], low_padding: Sequence[int], *, exact: bool) -> str:
    """A product as the text of a foreign call; sizes: of the labels of sliding axes; lengths and low padding of each of these axes, as
    `stretch` takes them. exact: its sums are the matrix unit's, else of f32 in any order."""
    sliding = [dataclasses.astuple(s) for s in whole.sliding]
    seen = [
        (s.reach(sizes[whole.lhs[s.axis]], sizes[s.label]), n, zeros)
        for s, n, zeros in zip(whole.sliding, lengths, low_padding, strict=True)
    ]
    used = [(label, sizes[label]) for outer, s in whole.outer.items() for label in (outer, s.label)]
    fields = {"lhs": whole.lhs, "rhs": whole.rhs, "out": whole.out, "sliding": sliding, "sizes": used, "seen": seen, "exact": exact}
    return json.dumps(fields)


def _padded_product(text: str, a: Array, b: Array, a_mask: Array, b_mask: Array) -> Array:
    """f32: the product of float carriers: of what patches see of `a`, and b. Masks broadcast to the whole operands, true at elements."""
    fields = json.loads(text)
    lhs, rhs, out = (tuple(fields[side]) for side in ("lhs", "rhs", "out"))
    whole = Contraction(lhs, rhs, out, tuple(SlidingAxis(*s) for s in fields["sliding"]))
    sizes = dict(fields["sizes"])
    lengths = {s.axis: n for s, (_, n, _) in zip(whole.sliding, fields["seen"], strict=True)}
    a_mask = np.broadcast_to(a_mask, [lengths.get(axis, n) for axis, n in enumerate(a.shape)])
    b_mask = np.broadcast_to(b_mask, b.shape)
    for s, (reach, n, zeros) in zip(whole.sliding, fields["seen"], strict=True):
        first, last, around = stretch(n, reach, zeros)
        margins = [around if axis == s.axis else (0, 0) for axis in range(a.ndim)]
        a_mask = np.pad(a_mask[(*(slice(None),) * s.axis, slice(first, last))], margins)
        a = np.pad(a, margins)
    left = [whole.patches(x, sizes, numpy_matmul.patches) for x in (a, a_mask)]
    with np.errstate(all="ignore"):
        return _in_parts(left, [b, b_mask], whole.of_patches(), exact=fields["exact"])


padded_product = foreign_call("tpuflow.padded_product", _padded_product)
"""(text of `described`, type of the result, a, b, mask of a, mask of b) -> the product, traced; a: the elements that patches see."""


def _in_parts(left: Sequence[Array], right: Sequence[Array], product: Contraction, *, exact: bool) -> Array:
    """The product of (array, mask) and (array, mask); large operands are cut along labels of the result."""
    lengths = product.by_label(left[0].shape, right[0].shape)
    for (x, _), labels in ((left, product.lhs), (right, product.rhs)):
        free = max((label for label in labels if label in product.out), key=lengths.__getitem__, default=None)
        if x.size > MOST_FACTORS and free is not None and lengths[free] > 1:
            half = lengths[free] // 2
            parts = [
                _in_parts(_cut(left, product.lhs, free, piece), _cut(right, product.rhs, free, piece), product, exact=exact)
                for piece in (slice(0, half), slice(half, None))
            ]
            return np.concatenate(parts, product.out.index(free))
    (a, a_mask), (b, b_mask) = left, right
    dtype = F16 if a.dtype == np.float16 else F32
    return numpy_matmul.matmul(a, b, product, dtype, F32, a_mask, b_mask, None if exact else np.matmul)


def _cut(arrays: Sequence[Array], labels: Sequence[int], label: int, piece: slice) -> list[Array]:
    return [x[(*(slice(None),) * labels.index(label), piece)] for x in arrays] if label in labels else list(arrays)
