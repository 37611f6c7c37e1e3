"""Random bits: what they are numbered by, what they cost, and what is simplified of the numbers made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpuflow
from tests.graphs import T, ops, simplified
from tpuflow.chips import CHIPS
from tpuflow.dtypes import F32, U32
from tpuflow.isa import philox
from tpuflow.lower.graph.builder import Builder
from tpuflow.lower.graph.graph import Value
from tpuflow.lower.graph.interpret import interpret

TPUS = [name for name, chip in CHIPS.items() if chip.family == "tpu"]


def _dropout(key: Any, x: Any, w: Any) -> Any:
    y = x @ w
    return jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y / 0.9, 0)


def _compiled(generator: str, chip: str) -> Any:
    x, w = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
    return tpuflow.jit(_dropout, chip=chip).lower(jax.random.key(0, impl=generator), x, w).compile()


@pytest.mark.parametrize("chip", ["generic", *TPUS])
def test_dropout_takes_no_longer_with_rbg_than_with_threefry(chip: str) -> None:
    with_rbg, with_threefry = (_compiled(generator, chip).time() for generator in ("rbg", "threefry2x32"))
    assert with_rbg.seconds <= with_threefry.seconds


def test_random_bits_are_made_where_they_are_used() -> None:
    kernels = _compiled("rbg", "tpu-v4").as_text().split("kernel")
    assert [("mm_accumulate" in k, "vector.select" in k) for k in kernels if "vector.random" in k] == [(True, True)]


def test_a_generator_makes_its_words_whatever_the_vector_units_and_without_one_they_compute_them() -> None:
    chip, shape = CHIPS["tpu-v4"], (16, 256)
    assert philox.generator_cycles(chip, shape) == philox.generator_cycles(replace(chip, vector_units=4), shape) == 16 * 256 // 128
    assert philox.operations(chip) == 1
    without = replace(chip, random_words=0)
    assert (philox.generator_cycles(without, shape), philox.operations(without)) == (0, philox.OPERATIONS)


def _seconds(logarithms: int, random_words: int) -> float:
    """Of a kernel that takes so many logarithms of an array and drops out some of them, on a chip that draws so many random words a cycle
    and whose memory does not matter."""

    def function(key: Any, x: Any) -> Any:
        for _ in range(logarithms):
            x = jnp.log(x)
        return jnp.where(jax.random.bits(key, x.shape) < 2**30, x, 0)

    known = {"hbm_bytes_per_second": 1e15, "dma_seconds": 0.0, "issue_cycles": 0.0, "random_words": random_words}
    arguments = jax.random.key(0, impl="rbg"), jax.ShapeDtypeStruct((4096, 1024), np.float32)
    compiled = tpuflow.jit(function, chip=replace(CHIPS["tpu-v4"], **known)).lower(*arguments).compile()
    return max(row.time.seconds for row in compiled.time().kernels)


@pytest.mark.parametrize(("logarithms", "by_generator"), [(0, True), (1, True), (4, False)])
def test_the_generator_draws_while_the_vector_unit_works(logarithms: int, by_generator: bool) -> None:
    """As the source of `random_words` measured: a kernel takes as long as its draws, or as its vector operations, whichever are longer."""
    found, lanes, drawing = _seconds(logarithms, 128), _seconds(logarithms, 2**20), 4096 * 1024 / 128 / 2 / CHIPS["tpu-v4"].clock_hz
    assert (drawing > lanes) == by_generator
    assert max(lanes, drawing) <= found < 1.05 * max(lanes, drawing)


def test_random_words_keep_their_numbers_in_another_shape() -> None:
    b = Builder("f", [T(U32, 4)])
    graph = simplified(b, b.reshape(b.random(b.inputs[0], (6, 4)), (3, 8)))
    assert ops(graph) == {"random": 1}
    state = np.arange(4, dtype=np.uint32)
    (found,), (expected,) = interpret(graph, state), interpret(b.finish([b.random(b.inputs[0], (24,))]), state)
    np.testing.assert_array_equal(found.reshape(-1), expected)


def _uniform(b: Builder, words: Value) -> Value:
    u = b.sub(b.bitcast(b.or_(b.shr_logical(words, 9), 0x3F800000), F32), 1.0)
    return b.max(b.full_like(u, 0.0), b.add(b.mul(u, 1.0), 0.0))


WORDS = np.array([0, 1, 511, 512, 0x7FFFFFFF, 0x80000000, 0xE6666600 - 1, 0xE6666600, 0xE66665FF + 512, 0xFFFFFE00, 0xFFFFFFFF], np.uint32)


@pytest.mark.parametrize("limit", [2.0**-14, 0.1, 0.5, 0.9, 1 - 2.0**-24, 1.0])
def test_a_bernoulli_draw_compares_the_words_themselves(limit: float) -> None:
    b = Builder("f", [T(U32, len(WORDS))])
    graph = simplified(b, b.lt(_uniform(b, b.inputs[0]), limit))
    assert "sub" not in ops(graph) and "bitcast" not in ops(graph)
    (found,), (expected,) = interpret(graph, WORDS), [(WORDS >> 9).astype(np.float32) / 2.0**23 < np.float32(limit)]
    assert found.tolist() == expected.tolist()


def test_a_uniform_number_is_not_scaled_by_one_nor_moved_by_zero() -> None:
    b = Builder("f", [T(U32, len(WORDS))])
    graph = simplified(b, _uniform(b, b.inputs[0]))
    assert ops(graph).keys().isdisjoint({"mul", "add", "max"})
    assert interpret(graph, WORDS)[0].tolist() == ((WORDS >> 9) / 2.0**23).tolist()


@pytest.mark.parametrize("limit", [0.0, -1.0, 2.0**-20, 2.0, float("nan"), float("inf")])
def test_other_limits_are_compared_as_they_are(limit: float) -> None:
    b = Builder("f", [T(U32, len(WORDS))])
    assert ops(simplified(b, b.lt(_uniform(b, b.inputs[0]), limit)))["sub"] == 1
