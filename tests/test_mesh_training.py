"""Trainings on several chips: data parallel, by hand and by `tpuflow.train`."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

import tpuflow
from models.norm import BatchNorm
from tests.partitioning import mesh_of
from tpuflow.chips.links import collective_seconds
from tpuflow.device.fast.translate import COPIED_ELEMS
from tpuflow.device.reference import ReferenceEngine
from tpuflow.device.timing import time_program
from tpuflow.errors import ConfigError
from tpuflow.isa.collectives import Await, Collective, MeshAxis
from tpuflow.isa.program import Kernel

P = PartitionSpec
RNG = np.random.default_rng(0)


LAYERS, BATCH = (16, 32, 24, 4), 16


def _parameters() -> list[tuple[np.ndarray, np.ndarray]]:
    sizes = itertools.pairwise(LAYERS)
    return [(RNG.normal(size=(m, n)).astype(np.float32) / m**0.5, np.zeros(n, np.float32)) for m, n in sizes]


def _loss(params: Any, x: Any, y: Any) -> Any:
    *hidden, (w, b) = params
    for wh, bh in hidden:
        x = jnp.tanh(x @ wh + bh)
    return jnp.mean((x @ w + b - y) ** 2)


def step_on_one_chip(params: Any, batch: Any) -> Any:
    """Gradient descent on the whole batch."""
    loss, grads = jax.value_and_grad(_loss)(params, *batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}


def data_parallel_step(chips: int) -> Any:
    """The same with a piece of the batch on each chip."""

    def step(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(_loss)(jax.tree.map(lambda p: lax.pcast(p, "d", to="varying"), params), *batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * lax.pmean(g, "d"), params, grads)
        return params, {"loss": lax.pmean(loss, "d")}

    return jax.shard_map(step, mesh=mesh_of({"d": chips}), in_specs=(P(), P("d")), out_specs=(P(), P()))


def _batches(count: int) -> list[Any]:
    return [(RNG.normal(size=(BATCH, 16)).astype(np.float32), RNG.normal(size=(BATCH, 4)).astype(np.float32)) for _ in range(count)]


@pytest.mark.parametrize("chips", [2, 8])
def test_a_data_parallel_training_is_that_of_one_chip_with_the_whole_batch_and_all_replicas_are_equal(chips: int) -> None:
    batches, initial = _batches(20), _parameters()
    steps = {"one": tpuflow.jit(step_on_one_chip), "several": tpuflow.jit(data_parallel_step(chips))}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for name, step in steps.items():
        params = initial
        for batch in batches:
            params, figures = step(params, batch)
            losses[name].append(float(figures["loss"]))
    np.testing.assert_allclose(losses["several"], losses["one"], rtol=1e-6)
    engine = ReferenceEngine(steps["several"].program(initial, batches[0]))
    engine.launch([np.asarray(x) for x in jax.tree.leaves((initial, batches[0]))])
    for number in range(len(engine.program.outputs)):
        first, *others = engine.pieces(number)
        for other in others:
            np.testing.assert_array_equal(other, first)


def test_a_sink_cuts_its_batches_over_the_chips_and_gives_what_single_steps_do() -> None:
    batches, initial = _batches(6), _parameters()
    step, params, losses = tpuflow.jit(data_parallel_step(4)), initial, []
    for batch in batches:
        params, figures = step(params, batch)
        losses.append(np.asarray(figures["loss"]))
    (sunk,) = tpuflow.sink(data_parallel_step(4), batches, -1, state=initial, epochs=1)
    np.testing.assert_array_equal(sunk.metrics["loss"], losses)
    assert jax.tree.all(jax.tree.map(np.array_equal, sunk.state, params))


def sharded_step(chips: int, *, scattered: bool) -> Any:
    """Momentum, [parameter] or whole, for a flat vector of parameters: whole on every chip, or (ZeRO's first stage) each chip's share."""
    unravel = ravel_pytree(_parameters())[1]

    def step(state: Any, batch: Any) -> Any:
        params, momentum = state
        loss, grads = jax.value_and_grad(lambda flat: _loss(unravel(flat), *batch))(params)
        if scattered:
            own = lax.dynamic_slice_in_dim(params, lax.axis_index("d") * momentum.size, momentum.size)
            momentum = 0.9 * momentum + lax.psum_scatter(grads / chips, "d", tiled=True)
            params = lax.all_gather(own - 0.1 * momentum, "d", tiled=True)
        else:
            momentum = 0.9 * momentum + lax.psum(grads / chips, "d")
            params = params - 0.1 * momentum
        return (params, momentum), {"loss": lax.pmean(loss, "d")}

    states = (P(), P("d") if scattered else P())
    return jax.shard_map(step, mesh=mesh_of({"d": chips}), in_specs=(states, P("d")), out_specs=(states, P()), check_vma=False)


def test_an_optimizer_state_in_shares_gives_the_bits_of_a_whole_one_in_a_sink_too() -> None:
    """For a sum is its scattered parts, gathered: what is declared of both is one order."""
    flat, batches = ravel_pytree(_parameters())[0], _batches(5)
    state = (np.asarray(flat), np.zeros(flat.size, np.float32))
    found = {}
    for scattered in (False, True):
        (sunk,) = tpuflow.sink(sharded_step(4, scattered=scattered), batches, -1, state=state, epochs=1, engine="reference")
        found[scattered] = sunk
    np.testing.assert_array_equal(found[True].metrics["loss"], found[False].metrics["loss"])
    assert jax.tree.all(jax.tree.map(np.array_equal, found[True].state, found[False].state))
    program = tpuflow.jit(sharded_step(4, scattered=True)).program(state, batches[0])
    assert [p.shape for p in program.inputs[:2]] == [(flat.size,), (flat.size // 4,)]
    assert time_program(program).sent_bytes == (2 * flat.size * 3 // 4 + 2 * 3 * 1) * 4


@pytest.mark.slow
def test_train_on_a_mesh_is_that_of_one_chip() -> None:
    """A last batch of 6 samples, which four chips do not divide, is taken whole."""
    model = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(3)])
    data = (RNG.normal(size=(38, 5)).astype(np.float32), np.arange(38) % 3)
    options = {"optimizer": optax.sgd(0.1, momentum=0.9), "batch_size": 16, "epochs": 2, "progress": False, "engine": "reference"}
    for policy, bound in (("fp32", 1e-6), ("mixed", 2e-3)):
        one, several = (tpuflow.train(model, data, policy, **options, mesh=mesh) for mesh in (None, {"data": 4}))
        found, expected = ([v for epoch in r.history for v in epoch["losses"]] for r in (several, one))
        np.testing.assert_allclose(found, expected, rtol=bound)
        assert several.executables[0].program.mesh == (MeshAxis("data", 4),)
    assert "on generic, mesh {'data': 4}" in several.report()


class Normalised(nn.Module):
    """A dense layer, a batch normalisation over the chips along an axis, and another dense layer."""

    norm: type[nn.Module]
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Dense(16)(x)
        if self.norm is BatchNorm:
            x = BatchNorm(axis_name=self.axis_name)(x, train)
        else:
            x = nn.BatchNorm(use_running_average=not train, axis_name=self.axis_name)(x)
        return nn.Dense(3)(nn.relu(x))


def _normalised_training(norm: type[nn.Module], axis_name: str | None = None, **options: Any) -> tpuflow.TrainResult:
    rng = np.random.default_rng(5)
    data = (rng.normal(size=(64, 5)).astype(np.float32), rng.integers(0, 3, 64).astype(np.int32))
    model = Normalised(norm, axis_name)
    return tpuflow.train(model, data, optimizer=optax.sgd(0.1), batch_size=16, epochs=2, seed=1, progress=False, eval_data=data, **options)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [BatchNorm, nn.BatchNorm])
@pytest.mark.parametrize("sharding", ["ddp", "zero2", "zero3"])
def test_chips_that_normalise_their_batches_together_do_as_one_chip_with_the_whole_batch(norm: type[nn.Module], sharding: str) -> None:
    one = _normalised_training(norm)
    several = _normalised_training(norm, "data", mesh={"data": 4}, sharding=sharding)
    apart = _normalised_training(norm, mesh={"data": 4}, sharding=sharding)
    np.testing.assert_allclose(several.losses, one.losses, rtol=1e-6)
    for ours, theirs in zip(*(jax.tree.leaves(r.carried) for r in (several, one)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert several.history[-1]["evaluations"][-1] == pytest.approx(one.history[-1]["evaluations"][-1], rel=1e-5)
    assert abs(apart.losses[0] / one.losses[0] - 1) > 1e-3


@pytest.mark.parametrize("norm", [BatchNorm, nn.BatchNorm])
def test_chips_of_a_group_normalise_as_one_chip_with_the_groups_batch(norm: type[nn.Module]) -> None:
    two, groups = _normalised_training(norm, mesh={"data": 2}), _normalised_training(norm, "group", mesh={"data": 2, "group": 2})
    np.testing.assert_allclose(groups.losses, two.losses, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"mesh": {"chips": 2}}])
def test_an_axis_that_the_mesh_does_not_have_is_an_error_of_the_training(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"model Normalised computes over the chips along a mesh axis 'data', .* no such axis\. Give it"):
        _normalised_training(BatchNorm, "data", **options)


def test_large_parameters_stay_the_same_on_all_chips() -> None:
    """The fast engine orders what overwrites them behind what has read them, which differs from chip to chip."""
    images, labels = RNG.normal(size=(32, 256)).astype(np.float32), RNG.integers(0, 256, 32).astype(np.int32)
    assert 256 * 256 >= COPIED_ELEMS
    one, two = (
        tpuflow.train(
            nn.Dense(256),
            (images, labels),
            optimizer=optax.sgd(0.1),
            loss="softmax_cross_entropy",
            batch_size=16,
            progress=False,
            mesh=mesh,
        )
        for mesh in (None, {"data": 2})
    )
    np.testing.assert_allclose(two.losses, one.losses, rtol=1e-6)


@pytest.mark.slow
def test_dropout_differs_from_chip_to_chip_and_a_mesh_that_does_not_fit_is_refused() -> None:
    """With one and the same sample everywhere, a chip's mask is all that can make its gradient another one."""
    model = nn.Sequential([nn.Dense(64), lambda x: nn.Dropout(0.5, deterministic=False)(x), nn.Dense(3)])
    data = (np.ones((8, 5), np.float32), np.zeros(8, np.int32))
    losses = {}
    for chips in (1, 2, 4):
        result = tpuflow.train(
            model, data, optimizer=optax.sgd(0.0), batch_size=8, progress=False, mesh={"data": chips}, engine="reference"
        )
        losses[chips] = result.history[0]["losses"][0]
    assert len(set(losses.values())) == 3
    for options, refused in (
        ({"mesh": {"data": 3}}, "a batch of 8 samples does not divide over 3 chips"),
        ({"mesh": {"data": 0}}, "expected axes with how many chips they have"),
        ({"mesh": 4}, "expected axes with how many chips they have"),
        ({"mesh": {"data": 2, "model": 2}}, "expected one axis, or some of data, group, expert"),
        ({"mesh": {"data": 2}, "sharding": "zero4"}, "zero4"),
    ):
        with pytest.raises(ConfigError, match=refused):
            tpuflow.train(model, data, batch_size=8, progress=False, **options)


@pytest.mark.parametrize("chips", [2, 4, 8, 64])
def test_a_step_sends_what_the_formula_says_and_hides_what_it_can(chips: int) -> None:
    """2 psi (n - 1) / n for n chips: each parameter's gradient is scattered, summed and gathered."""
    x, y = np.zeros((64, 16), np.float32), np.zeros((64, 4), np.float32)
    program = tpuflow.jit(data_parallel_step(chips), chip="tpu-v5e").program(_parameters(), (x, y))
    time = time_program(program)
    leaves = [p for layer in _parameters() for p in layer] + [np.float32(0)]
    assert time.sent_bytes == sum(2 * (chips - 1) * 4 * -(-leaf.size // chips) for leaf in leaves)
    sums = [collective_seconds(program.chip, "all_reduce", 4 * leaf.size, (chips,), (0,)) for leaf in leaves]
    assert time.link_seconds == pytest.approx(sum(sums))
    assert 0 < time.exposed_link_seconds < time.link_seconds
    kinds = [type(block) for block in program.code]
    first = kinds.index(Collective)
    assert Kernel in kinds[first : kinds.index(Await)]  # what does not need the sum runs before the wait
