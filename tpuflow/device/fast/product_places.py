"""Addresses of a product's terms: from the number of an element of the product to its rows in the operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.isa.contraction import Contraction

Value = Any
Axes = Sequence[int]


@dataclass(frozen=True)
class Places:
    """The layout of a product: labels and sizes of its axes, labels of the contracted ones and of the operands' axes, terms of a sum."""

    product: tuple[int, ...]
    sizes: tuple[int, ...]
    contracted: tuple[int, ...]
    terms: int
    a_axes: tuple[int, ...]
    b_axes: tuple[int, ...]

    @classmethod
    def of(cls, whole: Contraction, a: Value, b: Value) -> Places:
        sizes, product, contracted = whole.by_label(a.shape, b.shape), product_axes(whole), whole.contracted
        terms = math.prod(sizes[x] for x in contracted)
        return cls(product, tuple(sizes[x] for x in product), contracted, terms, whole.lhs, whole.rhs)

    def starts(self, axes: Axes, place: Value) -> Value:
        """s32 [C, axes that are not contracted]: the indices in an operand of the first terms of C elements, numbered row-major
        (`place`)."""
        left, index = lax.max(place, jnp.zeros_like(place)), {}
        for label, size in zip(reversed(self.product), reversed(self.sizes), strict=True):
            index[label], left = lax.rem(left, np.int32(size)), lax.div(left, np.int32(size))
        free = [index[label] for label in axes if label not in self.contracted]
        return jnp.stack(free, axis=1) if free else jnp.zeros((place.size, 0), jnp.int32)

    def terms_of(self, operand: Value, axes: Axes, starts: Value) -> Value:
        """float64 [K, C]: the operand's factors of the K terms of each of C elements; starts: as `starts` gives them."""
        free = [i for i, label in enumerate(axes) if label not in self.contracted]
        within = [i for i in range(len(axes)) if i not in free]
        sizes = [1 if i in free else operand.shape[i] for i in range(len(axes))]
        numbers = lax.GatherDimensionNumbers(tuple(range(len(within))), tuple(free), tuple(free))
        pieces = lax.gather(operand, starts, numbers, sizes, mode="promise_in_bounds")
        order = sorted(range(len(within)), key=lambda i: self.contracted.index(axes[within[i]]))
        rows = lax.reshape(lax.transpose(pieces, [*order, len(within)]), (self.terms, len(starts)))
        return lax.convert_element_type(rows, jnp.float64)


def product_axes(whole: Contraction) -> tuple[int, ...]:
    """The order of axes in which XLA's dot gives the product."""
    rows, columns = whole.rows, whole.columns
    return (*whole.batch, *(x for x in whole.lhs if x in rows), *(x for x in whole.rhs if x in columns))


def dot_dimensions(whole: Contraction) -> tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]:
    """XLA's dot dimension numbers."""
    contracted, batch = whole.contracted, whole.batch
    return (
        ([whole.lhs.index(x) for x in contracted], [whole.rhs.index(x) for x in contracted]),
        ([whole.lhs.index(x) for x in batch], [whole.rhs.index(x) for x in batch]),
    )
