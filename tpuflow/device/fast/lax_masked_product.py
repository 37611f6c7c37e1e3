"""Products of padded operands: the zeros of the padding take part in no product, so 0 * infinity or 0 * NaN there makes no NaN.

Where everything is finite a zero adds nothing, so the product is computed as if the padding were elements, in the quickest form. If a zero
of the padding may have met an infinity or NaN, it is computed again by `padded_product`: in a loop that runs no trip in the first case.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpuflow.device.fast.lax_rounding import widen
from tpuflow.device.fast.padded_product import padded_product
from tpuflow.dtypes import F32, DType

Value = Any
Mask = Callable[[], Value]
"""() -> pred of an operand's rank, axes of size 1 broadcast: true where it has elements, false in its padding."""


def without_padding(
    product: Value, a: Value, b: Value, masks: tuple[Mask | None, Mask | None], met: Sequence[Value], dtype: DType, text: str
) -> Value:
    """`product`, in f32, but without the products of padding if zeros of it may have met infinities or NaN.

    a, b: its operands, of `dtype`; masks: of a and of b (None: no padding); met: the operands that zeros of the other's padding have met;
    text: what `padded_product.described` says of it.
    """

    def again(_: tuple[Value, Value]) -> tuple[Value, Value]:
        elements = [jnp.ones((1,) * x.ndim, jnp.bool_) if mask is None else mask() for x, mask in zip((a, b), masks, strict=True)]
        return jnp.zeros((), jnp.bool_), padded_product(text, jax.ShapeDtypeStruct(product.shape, product.dtype), a, b, *elements)

    needed = _may_be_not_finite(product, met, dtype)
    return lax.while_loop(lambda state: state[0], again, (needed, product))[1]  # not a `cond`: the product is updated in place


def _may_be_not_finite(product: Value, met: Sequence[Value], dtype: DType) -> Value:
    """pred []: whether any of these operands may hold an infinity or NaN. Either makes every sum that it is in infinite or NaN, so the
    operands tell or the product: the smaller is tested."""
    tested = [(x, dtype) for x in met] if sum(x.size for x in met) <= product.size else [(product, F32)]
    return functools.reduce(lax.bitwise_or, [_any_not_finite(x, kind) for x, kind in tested])


def _any_not_finite(x: Value, dtype: DType) -> Value:
    """pred []: whether any number is infinite or NaN, tested by a product with zeros, which is NaN only then.

    That is the quickest test of a whole array, to run and to compile: XLA:CPU has matrix products ready (two rows of zeros make it one),
    while a reduction takes it three kernels.
    """
    width = x.shape[-1] if x.ndim else 1
    rows = lax.reshape(widen(x, dtype), (math.prod(x.shape[:-1]), width))
    sums = lax.dot(jnp.zeros((2, rows.shape[0]), jnp.float32), rows)
    total = lax.dot(sums, jnp.zeros((width, 2), jnp.float32))[0, 0]
    return lax.ne(total, total)
