"""What is compiled depends on JAX's settings where it is called, as under jax.jit: precision, random numbers, promotion."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpuflow
from tpuflow.chips import get_chip
from tpuflow.numerics.operations import run_operation
from tpuflow.stages.staging import Target


def test_a_function_is_traced_again_under_other_settings() -> None:
    """As by jax.jit: for the precision of products above all, which would silently be that of the first call; and once for each."""
    traced: list[str | None] = []

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        traced.append(jax.config.jax_default_matmul_precision)  # type: ignore[attr-defined]
        return x @ y + jnp.ones(16)

    f, x = tpuflow.jit(product, chip="tpu-v3"), jnp.asarray(np.random.default_rng(0).standard_normal((16, 16)), jnp.float32)
    results: dict[str, np.ndarray] = {}
    for _ in range(3):
        for precision in ("bfloat16", "highest", "bfloat16"):
            with jax.default_matmul_precision(precision):
                found = np.asarray(f(x, x))
                np.testing.assert_array_equal(found, results.setdefault(precision, found))
                np.testing.assert_array_equal(found, f(np.asarray(x), x))
    assert traced == ["bfloat16", "highest"] and (results["bfloat16"] != results["highest"]).any()
    with jax.default_matmul_precision("highest"):
        np.testing.assert_array_equal(results["highest"], tpuflow.jit(product, chip="tpu-v3")(x, x))
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank"):
        f(x, x)


def test_operations_one_by_one_are_traced_again_under_other_settings() -> None:
    bits, key = tpuflow.jit(lambda k: jax.random.bits(k, (5,))), jax.random.key(0)
    for partitionable in (True, False):
        with jax.threefry_partitionable(partitionable):
            expected = np.asarray(jax.jit(lambda k: jax.random.bits(k, (5,)))(key))
            with jax.disable_jit():
                np.testing.assert_array_equal(bits(key), expected)
            np.testing.assert_array_equal(bits(key), expected)


def test_operations_whose_numbers_are_checked_are_traced_again_under_other_settings() -> None:
    key = jax.random.key(0)
    for partitionable in (True, False):
        with jax.threefry_partitionable(partitionable):
            (equation,) = jax.make_jaxpr(lambda k: jax.random.bits(k, (5,)))(key).eqns
            (found,) = run_operation(equation, [key], Target(get_chip("generic")))
            np.testing.assert_array_equal(found, jax.jit(lambda k: jax.random.bits(k, (5,)))(key))
