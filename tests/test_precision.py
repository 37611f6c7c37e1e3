"""`jax.lax.Precision`: products of f32 on chips whose arrays take 16 bits, in one pass, three or six; other chips are not touched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tpuflow
from tpuflow.chips import get_chip
from tpuflow.compiler import compile_function
from tpuflow.device.timing import time_program
from tpuflow.errors import UnsupportedPrimitiveError
from tpuflow.isa.file import to_bytes
from tpuflow.isa.matrix import MatmulAccumulate
from tpuflow.isa.program import Program

TPU, ASCEND = "tpu-v3", "ascend910"
PASSES = {"default": 1, "high": 3, "highest": 6}
KEPT = {"default": 8, "high": 16, "highest": 24}
"""Bits of an operand that its parts hold, 8 each."""


def _conv(x: Any, w: Any, precision: Any = None) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (2, 1), "SAME", dimension_numbers=numbers, precision=precision)


PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "matrices of many tiles": (jnp.matmul, (33, 1300), (1300, 20)),
    "batch": (jnp.matmul, (3, 20, 33), (3, 33, 7)),
    "convolution": (_conv, (2, 9, 8, 3), (3, 3, 3, 5)),
}


def _operands(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def _on(chip: str, function: Callable[..., Any], *arrays: Any, **options: Any) -> np.ndarray:
    return np.asarray(tpuflow.jit(function, chip=chip, **options)(*arrays))


def _program(function: Callable[..., Any], *shapes: tuple[int, ...], chip: str = TPU) -> Program:
    return compile_function(function, tuple(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes), chip=get_chip(chip))


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint32)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PASSES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_engines_agree_bit_for_bit_and_more_passes_are_nearer_to_the_exact_product(name, precision):
    function, *shapes = PRODUCTS[name]
    a, b = _operands(*shapes)
    product = functools.partial(function, precision=precision)
    exact, ours, native = (
        _on("generic", function, a, b, fidelity="bitexact"),
        _on(TPU, product, a, b, fidelity="bitexact"),
        _on(TPU, product, a, b),
    )
    np.testing.assert_array_equal(_bits(ours), _bits(_on(TPU, product, a, b, engine="reference")))
    # Each operand is off by half a unit of its last kept bit; f32 sums by far less than their terms' number in units of 2^-24.
    terms = _on("generic", function, np.abs(a), np.abs(b))
    for found in (ours, native):
        error = np.max(np.abs(found - exact) / terms)
        assert error <= 2.0 ** -KEPT[precision] + 64 * 2.0**-24
        assert error > 2.0 ** -(KEPT[precision] + 8) or precision == "highest", "parts that hold no less than they should"


def test_one_pass_is_the_product_of_the_operands_in_bf16():
    a, b = _operands((33, 200), (200, 17))
    ours = _on(TPU, jnp.matmul, a, b, fidelity="bitexact")

    def narrowed(a: Any, b: Any) -> Any:
        return jnp.matmul(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32)

    np.testing.assert_array_equal(_bits(ours), _bits(_on("generic", narrowed, a, b, fidelity="bitexact")))


@pytest.mark.parametrize("precision", PASSES)
def test_on_an_ascend_operands_are_always_f16(precision):
    a, b = _operands((9, 33), (33, 7))
    ours = _on(ASCEND, functools.partial(jnp.matmul, precision=precision), a, b, fidelity="bitexact")
    halves = (x.astype(np.float16).astype(np.float64) for x in (a, b))
    np.testing.assert_array_equal(_bits(ours), _bits(np.matmul(*halves).astype(np.float32)))
    assert np.isinf(_on(ASCEND, jnp.matmul, np.full((1, 1), 1e5, np.float32), np.ones((1, 1), np.float32)))


@pytest.mark.parametrize("engine", ["reference", "fast"])
@pytest.mark.parametrize("precision", PASSES)
def test_infinities_and_nan_come_through_every_number_of_passes(precision, engine):
    a = np.array([[np.inf, 1.0], [-np.inf, 1.0], [np.nan, 1.0], [2.0, 1.0], [0.0, 1.0]], np.float32)
    b = np.array([[2.0], [1.0 + 2**-20]], np.float32)
    found = _on(TPU, functools.partial(jnp.matmul, precision=precision), a, b, engine=engine, fidelity="bitexact")
    np.testing.assert_allclose(found[:, 0], [np.inf, -np.inf, np.nan, 5.0, 1.0], rtol=2**-8)


@pytest.mark.parametrize("chip", ["generic", "bm1690"])
def test_a_chip_that_takes_f32_is_given_the_same_program_at_every_precision(chip):
    products = (functools.partial(jnp.matmul, precision=p) for p in (None, *PASSES))
    assert len({to_bytes(_program(product, (40, 60), (60, 20), chip=chip).strip()) for product in products}) == 1


def _instructions(function: Callable[..., Any], *shapes: tuple[int, ...]) -> list[str]:
    """The precision of every product."""
    return [i.precision for k in _program(function, *shapes).kernels() for i in k.body if isinstance(i, MatmulAccumulate)]


def test_the_default_of_a_context_and_gradients_and_the_higher_of_two_are_obeyed():
    square = ((16, 16), (16, 16))
    with jax.default_matmul_precision("highest"):
        assert _instructions(lambda a, b: a @ b, *square) == ["bf16_x6"]
    high = jax.grad(lambda a, b: jnp.sum(jnp.matmul(a, b, precision="high") ** 2), (0, 1))
    assert set(_instructions(high, *square)) == {"bf16_x3"}
    assert _instructions(lambda a, b: jnp.matmul(a, b, precision=("default", "highest")), *square) == ["bf16_x6"]
    assert set(_instructions(jax.grad(lambda x, w: jnp.sum(_conv(x, w, "high") ** 2), (0, 1)), *PRODUCTS["convolution"][1:])) == {"bf16_x3"}
    assert _instructions(lambda a, b: (a @ b.T).T, (16, 8), (4, 8)) == ["bf16"]


def test_operands_of_16_bits_enter_as_they_are():
    assert _instructions(lambda a, b: jnp.matmul(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), precision="highest"), (8, 8), (8, 8)) == [
        "exact"
    ]


def test_algorithms_by_name_are_taken_where_the_device_has_them_and_refused_elsewhere():
    def product(name: str) -> Callable[..., Any]:
        return lambda a, b: lax.dot(a, b, precision=lax.DotAlgorithmPreset[name], preferred_element_type=np.float32)

    assert _instructions(product("BF16_BF16_F32_X3"), (8, 8), (8, 8)) == ["bf16_x3"]
    assert _instructions(product("BF16_BF16_F32"), (8, 8), (8, 8)) == ["exact"], "of operands that were rounded"
    with pytest.raises(UnsupportedPrimitiveError, match="precision TF32_TF32_F32; there are: DEFAULT, HIGH, HIGHEST"):
        _instructions(product("TF32_TF32_F32"), (8, 8), (8, 8))


def test_passes_are_paid_for():
    square = (2048, 2048)
    times = {p: time_program(_program(functools.partial(jnp.matmul, precision=p), square, square)) for p in PASSES}
    busy = {p: time.busy_seconds["matrix"] for p, time in times.items()}
    for p, passes in PASSES.items():
        assert busy[p] == pytest.approx(passes * busy["default"], rel=0.1), "the rest is issue and drain"
        assert f"as bf16, in {passes} pass" in times[p].summary()
        assert times[p].work.macs == {"f32": 2048**3}
