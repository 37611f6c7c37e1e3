"""Layers of bench/decoders.py: attention in windows and through a latent, and models of the sizes that published rows are of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.decoders import Heads, HeadsAttention, Latent, LatentAttention, MeshConfig, attend_near
from bench.transformers import PUBLISHED
from models.attention import Context, attend, causal

CONFIG = MeshConfig(hidden_size=16, num_attention_heads=4)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 4, 6])
def test_attention_in_blocks_is_that_of_a_window(window: int) -> None:
    q, k, v = (jax.random.normal(jax.random.key(n), (2, 12, heads, 8)) for n, heads in enumerate((4, 2, 2)))
    apart = jnp.arange(12)[:, None] - jnp.arange(12)
    np.testing.assert_allclose(attend_near(q, k, v, window), attend(q, k, v, (apart >= 0) & (apart < window)), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "attention",
    [
        LatentAttention(CONFIG, Latent(None, 6, plain=4, turned=2, value=3)),
        LatentAttention(CONFIG, Latent(5, 6, plain=4, turned=2, value=3)),
        HeadsAttention(CONFIG, Heads(2, 8, window=4)),
        HeadsAttention(CONFIG, Heads(1, 8, turned=0.25, keys_are_values=True)),
    ],
)
def test_a_token_sees_none_after_it(attention: Any) -> None:
    x, context = jax.random.normal(jax.random.key(0), (2, 12, 16)), Context(causal(12, None))
    mixed, variables = attention.init_with_output(jax.random.key(1), x, context)
    other = attention.apply(variables, x.at[:, 8:].add(1.0), context)
    np.testing.assert_array_equal(mixed[:, :8], other[:, :8])
    assert not jnp.isclose(mixed[:, 8:], other[:, 8:]).all(-1).any()


@pytest.mark.parametrize(
    ("row_id", "billions"),
    [
        ("M366", 15.71), ("M384", 11.77), ("M399", 7.24), ("M401", 46.70), ("M403", 671.03), ("M404", 405.85), ("M413", 25.23),
        ("M415", 30.70), ("M426", 235.09),
    ],
)  # fmt: skip
def test_the_published_rows_are_of_models_of_their_sizes(row_id: str, billions: float) -> None:
    """As DeepSeek, Google, Meta, Mistral and Qwen state them, without what sees pictures."""
    config = PUBLISHED[row_id].step()
    shapes = jax.eval_shape(config.model.init, jax.random.key(0), jax.ShapeDtypeStruct((PUBLISHED[row_id].chips, 8), jnp.int32))
    assert sum(x.size for x in jax.tree.leaves(shapes["params"])) / 1e9 == pytest.approx(billions, abs=0.005)
