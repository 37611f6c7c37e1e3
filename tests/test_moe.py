"""The mixture of experts: what its gates choose, and that experts over a mesh give the values of one chip."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import tpuflow
from models.moe import MoE, capacity
from tpuflow.isa.collectives import Collective

RNG = np.random.default_rng(0)
TOKENS = RNG.normal(size=(16, 12)).astype(np.float32)


def by_hand(params: Any, tokens: np.ndarray, k: int, places: int) -> np.ndarray:
    """Token by token, as the layer's documentation says."""
    p = jax.tree.map(np.asarray, params["params"])
    logits = tokens.astype(np.float64) @ p["gate"]["kernel"]
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    order = np.argsort(-logits, -1)[:, :k]
    used, kept = np.zeros(logits.shape[1], int), np.zeros_like(order, bool)
    for choice in range(k):
        for token, expert in enumerate(order[:, choice]):
            kept[token, choice] = used[expert] < places
            used[expert] += 1
    found = np.zeros_like(tokens, dtype=np.float64)
    for token in range(len(tokens)):
        weights = probabilities[token, order[token]] * kept[token]
        weights = weights / weights.sum() if k == 2 and weights.sum() else weights
        for weight, expert in zip(weights, order[token], strict=True):
            found[token] += weight * (tokens[token] @ p["kernel"][expert] + p["bias"][expert])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("k", "factor"), [(1, 1.0), (1, 4.0), (2, 1.0), (2, 0.5)])
def test_tokens_go_to_the_experts_that_their_gate_chooses_as_long_as_there_is_place(k: int, factor: float) -> None:
    layer = MoE(4, k, factor, min_capacity=0)
    params = layer.init(jax.random.key(0), TOKENS)
    params["params"]["bias"] = jnp.asarray(RNG.normal(size=(4, 12)), jnp.float32)
    expected = by_hand(params, TOKENS, k, capacity(16, 4, k * factor, 0))
    np.testing.assert_allclose(layer.apply(params, TOKENS), expected, rtol=1e-4, atol=1e-5)
    found = tpuflow.jit(layer.apply, engine="reference")(params, TOKENS)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("k", [1, 2])
def test_experts_over_a_mesh_give_the_values_and_gradients_of_one_chip(k: int, own: bool) -> None:
    """Two groups of two chips; each chip has a group of tokens, and two of four experts."""
    options = {"experts": 4, "k": k, "residual": True, "min_capacity": 0}
    one, spread = MoE(**options, group_tokens=4), MoE(**options, axis="expert", own=own)
    params = one.init(jax.random.key(0), TOKENS)
    weights = RNG.normal(size=TOKENS.shape).astype(np.float32)
    mesh = AbstractMesh((2, 2), ("data", "expert"))
    cut = {"kernel": P("expert"), "bias": P("expert")} if own else {}
    specs = {"params": {name: jax.tree.map(partial(_spec, cut.get(name, P())), tree) for name, tree in params["params"].items()}}
    pieces = P(("data", "expert"))

    def loss(layer: MoE, params: Any, x: Any, w: Any) -> Any:
        return jnp.sum(layer.apply(params, x) * w)

    def step(params: Any, x: Any, w: Any) -> Any:
        grads = jax.grad(lambda p: loss(spread, p, x, w))(params)
        total = {name: lax.psum(g, "data" if name in cut else ("data", "expert")) for name, g in grads["params"].items()}
        return spread.apply(params, x), {"params": total}

    chips = jax.shard_map(step, mesh=mesh, in_specs=(specs, pieces, pieces), out_specs=(pieces, specs), check_vma=False)
    expected = jax.jit(lambda p, x, w: (one.apply(p, x), jax.grad(lambda p: loss(one, p, x, w))(p)))(params, TOKENS, weights)
    function = tpuflow.jit(chips, fidelity="bitexact")
    found, exact = (tpuflow.jit(chips, engine="reference")(params, TOKENS, weights), function(params, TOKENS, weights))
    for a, b, truth in zip(*map(jax.tree.leaves, (found, exact, expected)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, truth, rtol=1e-4, atol=1e-5)
    kinds = [b.kind for b in function.program(params, TOKENS, weights).code if isinstance(b, Collective)]
    assert kinds.count("all_to_all") == 3  # there and back, and there again with gradients: none of the inputs is asked for


def _spec(spec: Any, leaf: Any) -> Any:
    return spec


class Network(nn.Module):
    """A layer, experts, a layer."""

    group_tokens: int | None = None
    axis: str | None = None
    noise: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """[B, D] -> [B, 3]."""
        x = nn.relu(nn.Dense(12)(x))
        options = {"group_tokens": self.group_tokens, "axis": self.axis, "noise": self.noise, "balance": 0.01}
        return nn.Dense(3)(x + MoE(4, **options, min_capacity=0, train=train)(x))


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "zero2", "zero3"])
def test_a_training_with_experts_over_a_mesh_is_that_of_one_chip(sharding: str) -> None:
    """The load-balancing loss is part of it."""
    data, options = (TOKENS, np.arange(16) % 3), {"optimizer": optax.sgd(0.1), "batch_size": 16, "epochs": 4, "progress": False}
    one = tpuflow.train(Network(group_tokens=4), data, **options)
    mesh = {"data": 2, "expert": 2}
    several = tpuflow.train(Network(axis="expert"), data, **options, mesh=mesh, sharding=sharding, fidelity="bitexact")
    found, expected = ([loss for epoch in r.history for loss in epoch["losses"]] for r in (several, one))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["RSample", "Jitter"])
def test_noise_of_a_gate_is_drawn_in_training_only_and_on_each_chip_anew(noise: str) -> None:
    data = (np.repeat(TOKENS[:1], 8, 0), np.zeros(8, int))
    losses = [
        tpuflow.train(Network(group_tokens=2, noise=noise), data, optimizer=optax.sgd(0.0), batch_size=8, epochs=2, progress=False, **mesh)
        for mesh in ({}, {"mesh": {"data": 4}})
    ]
    values = [epoch["losses"][0] for r in losses for epoch in r.history]
    assert len(set(values)) == 4
    layer = MoE(4, noise=noise, random_tokens=True)
    params = layer.init(jax.random.key(0), TOKENS)
    np.testing.assert_array_equal(layer.apply(params, TOKENS), MoE(4).apply(params, TOKENS))


@pytest.mark.slow
def test_tokens_that_stay_are_drawn_at_random() -> None:
    layer = MoE(2, random_tokens=True, min_capacity=0, train=True, capacity_factor=0.5)
    params = layer.init(jax.random.key(0), TOKENS)
    apply = jax.jit(layer.apply)
    kept = [np.any(apply(params, TOKENS, rngs={"gate": jax.random.key(seed)}) != 0, -1) for seed in range(8)]
    assert all(1 <= k.sum() <= 8 for k in kept) and len({k.tobytes() for k in kept}) > 1


@pytest.mark.parametrize(
    ("options", "refused"),
    [({"k": 3}, "k of 1 or 2"), ({"noise": "Gauss"}, "expected noise"), ({"noise": "RSample", "k": 2}, "with k=1 only")],
)
def test_what_a_gate_cannot_be_is_refused(options: Any, refused: str) -> None:
    with pytest.raises(ValueError, match=refused):
        MoE(4, **options).init(jax.random.key(0), TOKENS)
