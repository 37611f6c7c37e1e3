"""Products of padded operands: the zeros of the padding take part in no product, so 0 * infinity or 0 * NaN there makes no NaN.

Where everything is finite a zero adds nothing, so the product is computed as if the padding were elements, in the quickest form. If a zero
of the padding may have met an infinity or NaN, it is computed again by `padded_product`: in a loop that runs no trip in the first case.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuflow.device.fast.lax_rounding import widen
from tpuflow.device.fast.padded_product import described, padded_product
from tpuflow.dtypes import F32, DType
from tpuflow.isa.contraction import Contraction

_MOST_ROWS = 1024
"""In which an array is tested."""

Value = Any
Mask = Callable[[], Value]
"""() -> pred of an operand's rank, axes of size 1 broadcast: true where it has elements, false in its padding."""


@dataclass(frozen=True, slots=True)
class Padding:
    """The padding of a product's operands of `dtype`: `whole` with `sizes` and `low_padding` as `lax_convolution.convolve` takes them.

    `a_mask`, `b_mask`: where there are elements of `a`, whose sliding axes have these `lengths`, and of b (None: everywhere). `exact`: the
    sums of products are the matrix unit's.
    """

    whole: Contraction
    sizes: Mapping[int, int]
    low_padding: Sequence[int]
    lengths: Sequence[int]
    dtype: DType
    exact: bool
    a_mask: Mask | None = None
    b_mask: Mask | None = None

    def correct(self, product: Value, a: Value, b: Value, labels: Contraction) -> Value:
        """The f32 product, but without the products of padding if zeros of it may have met infinities or NaN. Its axes may be merged.

        All three go into a loop as they lie in memory: in another shape or order each would be one more copy, to make and to compile.
        """
        met = [x for x, mask in ((b, self.a_mask), (a, self.b_mask)) if mask is not None]
        if not met or not self.dtype.is_float:
            return product
        text = described(labels, self.sizes, product.shape, self.lengths, self.low_padding, exact=self.exact)

        def again(state: tuple[Value, Value]) -> tuple[Value, Value]:
            masks = _elements(self.a_mask, self.whole.lhs, labels.lhs), _elements(self.b_mask, self.whole.rhs, labels.rhs)
            here = lax.optimization_barrier((a, b, state[0]))[:2]  # what does not change in a loop XLA may compute before it
            return jnp.zeros((), jnp.bool_), padded_product(text, jax.ShapeDtypeStruct(product.shape, product.dtype), *here, *masks)

        needed = _may_be_not_finite(product, met, self.dtype)
        return lax.while_loop(lambda state: state[0], again, (needed, product))[1]  # not a `cond`: the product is updated in place


def _elements(mask: Mask | None, labels: Sequence[int], order: Sequence[int]) -> Value:
    """A mask, with its axes in another order."""
    return jnp.ones((1,) * len(order), jnp.bool_) if mask is None else lax.transpose(mask(), [labels.index(x) for x in order])


def _may_be_not_finite(product: Value, met: Sequence[Value], dtype: DType) -> Value:
    """pred []: whether any of these operands may hold an infinity or NaN. Either makes every sum that it is in infinite or NaN, so the
    operands tell or the product: the smaller is tested."""
    tested = [(x, dtype) for x in met] if sum(x.size for x in met) <= product.size else [(product, F32)]
    return functools.reduce(lax.bitwise_or, [_any_not_finite(x, kind) for x, kind in tested])


def _any_not_finite(x: Value, dtype: DType) -> Value:
    """pred []: whether any number is infinite or NaN, tested by a product with zeros, which is NaN only then.

    That is the quickest test of a whole array, to run and to compile: XLA:CPU has matrix products ready (of two rows, `_zeros_and_ones`),
    while a reduction takes it three kernels.
    """
    count = max(k for k in range(1, max(1, min(math.isqrt(x.size), _MOST_ROWS)) + 1) if x.size % k == 0)
    rows = lax.reshape(widen(x, dtype), (count, x.size // count))
    sums = lax.dot(_zeros_and_ones(count), rows)
    total = lax.dot_general(sums, sums, (((1,), (1,)), ((), ())))[0, 0]
    return lax.ne(total, total)


def _zeros_and_ones(n: int) -> Value:
    """f32[2, n], a constant: a row of zeros, and one that is not to be read. For a product with one row XLA:CPU compiles a loop, for two it
    calls YNNPACK's, and were they equal it would compile a kernel that writes them."""
    return np.stack([np.zeros(n, np.float32), np.ones(n, np.float32)])
