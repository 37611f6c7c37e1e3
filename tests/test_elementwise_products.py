"""Products without rows, columns or anything to sum are multiplied and summed by the vector unit, not by the matrix unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tpuflow
from tests.graphs import T, bits, ops, simplified
from tpuflow.compiler import compile_function
from tpuflow.device.timing import time_program
from tpuflow.dtypes import BF16, F32
from tpuflow.isa.matrix import MatmulAccumulate
from tpuflow.isa.program import Program
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.interpret import interpret

COMBINE = "btkd,btk->btd"
FORMS = {
    COMBINE: ((3, 5, 4, 17), (3, 5, 4)),
    "nk,k->n": ((19, 33), (33,)),
    "k,kn->n": ((33,), (33, 19)),
    "k,k->": ((40,), (40,)),
    "bk,bk->b": ((5, 9), (5, 9)),
    "bnk,bk->bn": ((2, 7, 9), (2, 9)),
    "knb,kb->bn": ((9, 7, 2), (9, 2)),
    "bhd,bkhd->bhk": ((2, 3, 5), (2, 7, 3, 5)),
    "aij,ji->a": ((4, 5, 6), (6, 5)),
    "i,j->ij": ((9,), (7,)),
    "bi,bj->bij": ((2, 9), (2, 7)),
    "ib,jb->ijb": ((9, 2), (7, 2)),
}
"""Sums of products by subscripts of einsum, and the shapes of the operands."""


def _compiled(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = np.float32, chip: str = "tpu-v4") -> Program:
    return compile_function(function, [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes], chip=chip)


def _multiplies_matrices(program: Program) -> bool:
    return any(isinstance(i, MatmulAccumulate) for kernel in program.kernels() for i in kernel.instructions)


def _seconds(function: Callable[..., Any], *shapes: tuple[int, ...]) -> float:
    return time_program(_compiled(function, *shapes, dtype=jnp.bfloat16)).device_seconds


def _with_gradients(subscripts: str) -> Callable[..., Any]:
    return jax.value_and_grad(lambda x, y: jnp.square(jnp.einsum(subscripts, x, y).astype(np.float32)).sum(), (0, 1))


@pytest.mark.parametrize("subscripts", FORMS)
def test_the_matrix_unit_has_no_part_in_them_nor_in_their_gradients(subscripts: str) -> None:
    shapes = FORMS[subscripts]
    assert not _multiplies_matrices(_compiled(lambda x, y: jnp.einsum(subscripts, x, y), *shapes))
    assert not _multiplies_matrices(_compiled(_with_gradients(subscripts), *shapes))


@pytest.mark.parametrize("shapes", [((1, 33), (33, 19)), ((19, 33), (33, 1)), ((19, 1), (1, 7)), ((1, 33), (33, 1))])
def test_axes_of_length_one_are_rows_columns_or_a_sum_like_others(shapes: tuple[tuple[int, ...], ...]) -> None:
    assert _multiplies_matrices(_compiled(jnp.matmul, *shapes))


@pytest.mark.parametrize("subscripts", FORMS)
@pytest.mark.slow
def test_a_chip_whose_arrays_take_16_bits_multiplies_numbers_of_32(subscripts: str) -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in FORMS[subscripts])
    exact = np.einsum(subscripts, x.astype(np.float64), y.astype(np.float64))
    found = [
        np.asarray(tpuflow.jit(lambda x, y: jnp.einsum(subscripts, x, y), chip=chip, fidelity="bitexact")(x, y))
        for chip in ("tpu-v4", "bm1690")
    ]
    np.testing.assert_allclose(found[0], exact, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(bits(found[0]), bits(found[1]))


@pytest.mark.slow
def test_sums_of_16_bits_are_kept_in_32() -> None:
    ones = jnp.ones(1000, jnp.bfloat16)  # 256 + 1 is 256 in bf16
    assert tpuflow.jit(jnp.dot)(ones, ones) == jnp.bfloat16(1000)
    large = jnp.full(3, 300, jnp.float16)  # whose square is beyond f16
    assert tpuflow.jit(lambda x: lax.dot(x, x, preferred_element_type=np.float32))(large) == 270000


@pytest.mark.slow
def test_integers_are_multiplied_in_32_bits() -> None:
    small, large = jnp.full(300, -100, np.int8), jnp.full(5, 2**31 + 3, np.uint32)
    assert tpuflow.jit(lambda x: lax.dot(x, x, preferred_element_type=np.int32))(small) == 3_000_000
    assert tpuflow.jit(jnp.dot)(large, large) == 5 * (2**31 + 3) ** 2 % 2**32


@pytest.mark.slow
def test_a_product_of_nothing_is_zero() -> None:
    assert tpuflow.jit(jnp.dot)(jnp.ones((3, 0)), jnp.ones(0)).tolist() == [0, 0, 0]
    assert tpuflow.jit(jnp.outer)(jnp.ones(0), jnp.ones(3)).shape == (0, 3)


def test_mixing_what_experts_return_takes_the_time_of_reading_it() -> None:
    shapes = (2, 256, 8, 512), (2, 256, 8)
    padded = lambda x, y: jnp.einsum("btkd,btkj->btdj", x, y[..., None])  # noqa: E731
    assert _seconds(lambda x, y: jnp.einsum(COMBINE, x, y), *shapes) < 0.2 * _seconds(padded, *shapes)
    assert _seconds(_with_gradients(COMBINE), *shapes) < 2.5 * _seconds(lambda x, y: (x * y[..., None], x.sum(2)), *shapes)


def test_an_outer_product_is_made_in_the_order_in_which_it_is_wanted() -> None:
    b = Builder("f", [T(BF16, 2, 5), T(BF16, 2, 3)])
    x, y = (b.convert(b.broadcast(v, (2, 5, 3), (0, axis)), F32) for v, axis in zip(b.inputs, (1, 2), strict=True))
    graph = simplified(b, b.transpose(b.convert(b.mul(x, y), BF16), (0, 2, 1)))
    assert ops(graph)["transpose"] == 0
    values = [np.arange(2 * n, dtype=np.float32).reshape(2, n).astype(BF16.numpy) for n in (5, 3)]
    (made,) = interpret(graph, *values)
    np.testing.assert_array_equal(made, values[0][:, None] * values[1][..., None])
