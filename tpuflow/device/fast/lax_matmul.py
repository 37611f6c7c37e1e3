"""The matrix unit's sum in lax: bit-exact (float64, ascending, rounded once), native (XLA's f32 dot), and of integers."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from tpuflow.device.fast.lax_rounding import Rounding, started_from_zero, widen
from tpuflow.device.fast.ordered_product import ordered_product
from tpuflow.device.fast.product_places import Axes, Value, dot_dimensions, product_axes
from tpuflow.device.fast.reshapes import reshaped, transposed
from tpuflow.dtypes import DType
from tpuflow.isa.contraction import Contraction

_LONG, _NARROWER = 32, 1.5
_VECTOR = 16
"""Elements of f32 in the widest vectors of hosts (512 bits)."""


def matmul(rounding: Rounding, a: Value, b: Value, whole: Contraction, dtype: DType, acc: DType) -> Value:
    """See `Arithmetic.matmul`; operands are carriers."""
    if dtype.is_float and not rounding.bitexact:
        return _native(widen(a, dtype), widen(b, dtype), whole)
    if dtype.is_float:
        product = ordered_product(rounding, widen(a, dtype), widen(b, dtype), whole, dtype)
    else:
        product = _modular(a, b, whole, acc)
    order = product_axes(whole)
    return transposed(product, [order.index(x) for x in whole.out])


def _native(a: Value, b: Value, whole: Contraction) -> Value:
    """XLA's dot of f32 operands; of long, narrow operands as matrices, with the narrower one on the left."""
    if all(n == 1 for x, n in whole.by_label(a.shape, b.shape).items() if x in whole.contracted):
        return _elements_multiplied(a, b, whole)
    if not _are_long(a, b, whole):
        return _with_lanes(_dot, a, b, whole)
    return of_matrices(a, b, whole) if a.size < b.size else of_matrices(b, a, Contraction(whole.rhs, whole.lhs, whole.out))


def _elements_multiplied(a: Value, b: Value, whole: Contraction) -> Value:
    """A product with nothing to sum, which XLA makes part of the loops that read it: each element is +0 and one product."""
    sizes = whole.by_label(a.shape, b.shape)
    shape = [sizes[x] for x in whole.out]

    def spread(x: Value, labels: Axes) -> Value:
        kept = [label for label in whole.out if label in labels]
        turned = lax.transpose(x, [labels.index(label) for label in (*kept, *(y for y in labels if y not in kept))])
        return lax.broadcast_in_dim(turned.reshape([sizes[label] for label in kept]), shape, [whole.out.index(label) for label in kept])

    return started_from_zero(lax.mul(spread(a, whole.lhs), spread(b, whole.rhs)))


def _are_long(a: Value, b: Value, whole: Contraction) -> bool:
    """Whether operands are [K, columns] with many more terms than columns, and one much narrower than the other, as those of the gradient
    of a 1x1 convolution's weights.

    XLA transposes a left operand of several axes to [rows, K] in memory, but leaves a matrix to XLA:CPU's kernel, which transposes it in
    pieces, once for every piece of the product. One core takes, without and with this: for K = 51200, of 64 and 32 columns, 2.9 and 2.1 ms;
    for K = 12800, of 256 and 128, 5.8 and 5.0; but for K = 800, of 512 and 256, 1.0 and 1.1, and for GPT-2's K = 512, of 3072 and 768, 11.1
    and 12.0.
    """
    n = len(whole.contracted)
    if whole.batch or whole.lhs[:n] != whole.rhs[:n] or set(whole.lhs[:n]) != set(whole.contracted) or 0 in (a.size, b.size):
        return False
    terms = math.prod(a.shape[:n])
    narrow, wide = sorted((a.size // terms, b.size // terms))
    return terms >= _LONG * wide and wide >= _NARROWER * narrow


def _dot(a: Value, b: Value, whole: Contraction) -> Value:
    """XLA's dot in the result's order of axes."""
    if outer := _outer_axes(a, b, whole):
        a, b, whole = _batched(a, b, whole, outer)
    elif whole.batch and whole.lhs[-1] not in whole.contracted and whole.rhs[-1] in whole.contracted:
        # XLA:CPU's fast loops take batches of [rows, K] on the left and of [K, columns] or [columns, K] on the right
        a, b, whole = b, a, Contraction(whole.rhs, whole.lhs, whole.out)
    product, order = lax.dot_general(a, b, dot_dimensions(whole), preferred_element_type=jnp.float32), product_axes(whole)
    return transposed(product, [order.index(x) for x in whole.out])


def _batched(a: Value, b: Value, whole: Contraction, outer: int) -> tuple[Value, Value, Contraction]:
    """The same product with b, repeated over the outer axes of a, on the left: as rows for XLA:CPU's fast loops."""
    order = (*whole.columns, *whole.contracted)
    repeated = lax.broadcast(lax.transpose(b, [whole.rhs.index(x) for x in order]), a.shape[:outer])
    return repeated, a, Contraction((*whole.lhs[:outer], *order), whole.lhs, whole.out)


def _outer_axes(a: Value, b: Value, whole: Contraction) -> int:
    """How many outer axes of `a` make a batch over which `b` is to be repeated, so that nothing is transposed: the product has these axes
    of a, then b's columns, then a's other rows, a's last axis among them.

    XLA:CPU's dot would transpose both a [outer, K, inner] and the product [outer, inner, columns]: repeating b [K, columns] is to take
    less. The inner axes are to fill a vector.
    """
    rows, columns = ([x for x in side if x in whole.out] for side in (whole.lhs, whole.rhs))
    outer = next((i for i, (x, y) in enumerate(zip(whole.lhs, whole.out, strict=False)) if x != y), 0)
    inner = rows[outer:]
    if whole.batch or not inner or whole.lhs[-1] not in inner or (*rows[:outer], *columns, *inner) != whole.out or not a.size:
        return 0
    sizes = whole.by_label(a.shape, b.shape)
    count, width = (math.prod(sizes[x] for x in labels) for labels in (inner, columns))
    terms = b.size // max(1, width)
    return outer if count >= _VECTOR and b.size <= count * (terms + width) else 0


def _with_lanes(multiply: Callable[[Value, Value, Contraction], Value], a: Value, b: Value, whole: Contraction) -> Value:
    """multiply(a, b, whole), with a batching rule that makes the lanes of one operand rows (or columns) like its others. `vmap` itself
    would make them a separate axis, for which XLA copies the operand."""

    @custom_vmap
    def product(a: Value, b: Value) -> Value:
        return multiply(a, b, whole)

    @product.def_vmap
    def _(axis_size: int, batched: tuple[bool, bool], a: Value, b: Value) -> tuple[Value, bool]:
        lhs, rhs = ((0,) if lanes else () for lanes in batched)
        return _with_lanes(multiply if all(batched) else _merged, a, b, whole.with_batches(lhs, rhs, (0,))), True

    return product(a, b)


def of_matrices(a: Value, b: Value, whole: Contraction) -> Value:
    """XLA's dot of f32 operands with adjacent axes of one role merged, so that a transposed operand is not copied."""
    return _with_lanes(_merged, a, b, whole)


def _merged(a: Value, b: Value, whole: Contraction) -> Value:
    sizes = whole.by_label(a.shape, b.shape)
    a_runs, b_runs = _runs(whole.lhs, whole.rhs, whole.out), _runs(whole.rhs, whole.lhs, whole.out)
    left, right = (reshaped(x, [math.prod(sizes[y] for y in run) for run in runs]) for x, runs in ((a, a_runs), (b, b_runs)))
    run_of = {run[0]: run for run in (*a_runs, *b_runs)}
    lhs, rhs, out = (tuple(x for x in side if x in run_of) for side in (whole.lhs, whole.rhs, whole.out))
    merged = Contraction(lhs, rhs, out)
    product = lax.dot_general(left, right, dot_dimensions(merged), preferred_element_type=jnp.float32)
    order = [x for first in product_axes(merged) for x in run_of[first]]
    return transposed(reshaped(product, [sizes[x] for x in order]), [order.index(x) for x in whole.out])


def _runs(axes: Axes, others: Axes, out_axes: Axes) -> list[list[int]]:
    """Axes of one operand in runs that are of one role and, if the other operand has them, adjacent there too."""
    place = {x: i for i, x in enumerate(others)}
    runs: list[list[int]] = []
    for i, x in enumerate(axes):
        before = axes[i - 1]
        alike = i > 0 and (x in place, x in out_axes) == (before in place, before in out_axes)
        if alike and (x not in place or place[x] == place[before] + 1):
            runs[-1].append(x)
        else:
            runs.append([x])
    return runs


def _modular(a: Value, b: Value, whole: Contraction, acc: DType) -> Value:
    """Integers modulo 2^32; s8 and s16 operands go to XLA as they are, it has faster loops for them."""
    if a.dtype.kind == "u":
        a, b = lax.convert_element_type(a, jnp.int32), lax.convert_element_type(b, jnp.int32)
    return lax.convert_element_type(lax.dot_general(a, b, dot_dimensions(whole), preferred_element_type=jnp.int32), acc.numpy)
