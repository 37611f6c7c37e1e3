"""The mixtures of experts of bench/decoders.py: with place for all tokens it is Mixtral's own, and with less it drops the last ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.decoders import DroppingExperts, MeshConfig, SortedExperts
from models import mixtral

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
X = jax.random.normal(jax.random.key(0), (2, 12, 16))


def _both(capacity_factor: float) -> tuple[Any, Any]:
    config = MeshConfig(**SIZES, experts=4, capacity_factor=capacity_factor)
    module = DroppingExperts(config)
    variables = module.init(jax.random.key(1), X)
    exact = mixtral.Experts(mixtral.Config(**SIZES, num_local_experts=4, num_key_value_heads=2))
    params = {name: {"kernel": value} if name != "gate" else value for name, value in variables["params"].items()}
    return module.apply(variables, X), exact.apply({"params": params}, X)[0]


@pytest.mark.slow
def test_with_place_for_all_it_is_the_exact_mixture() -> None:
    dropping, exact = _both(4.0)
    np.testing.assert_allclose(dropping, exact, rtol=2e-5, atol=1e-7)


def test_the_last_tokens_of_a_sequence_are_dropped() -> None:
    dropping, exact = _both(0.5)
    same = jnp.isclose(dropping, exact, rtol=1e-4, atol=1e-7).all(-1)
    assert same[:, 0].all() and not same[:, -1].any() and 0 < same.sum() < same.size


@pytest.mark.slow
@pytest.mark.parametrize("capacity_factor", [4.0, 1.0, 0.5])
def test_sorting_tokens_is_what_masks_do_gradients_too(capacity_factor: float) -> None:
    config = MeshConfig(**SIZES, experts=4, capacity_factor=capacity_factor)
    variables = DroppingExperts(config).init(jax.random.key(1), X)

    def loss(module: Any, variables: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(100 * module.apply(variables, x)))

    masked, ordered = (
        jax.value_and_grad(loss, (1, 2))(module, variables, X) for module in (DroppingExperts(config), SortedExperts(config))
    )
    for one, other in zip(jax.tree.leaves(masked), jax.tree.leaves(ordered), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-6)
