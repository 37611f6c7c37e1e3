"""Collectives over the axes of `vmap`, and of `shard_map` and `pmap` on one device, give what plain jax.jit gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import tpuflow
from tests.tolerances import sum_bound
from tpuflow.errors import UnsupportedPrimitiveError

MESH = Mesh(np.array(jax.devices()[:1]), ("i",))
RNG = np.random.default_rng(0)
CLOSE = {"rtol": sum_bound(32), "atol": sum_bound(32)}
"""No sum here, gradients included, has more terms, or terms far from 1."""


class Row(NamedTuple):
    """`fn` of one shard. `lanes`: the operand under `vmap`, None where JAX has no such collective there; `shard`: on one device.

    `differentiable`: JAX has a gradient of it in every way below.
    """

    name: str
    fn: Callable[[Any], Any]
    lanes: tuple[int, ...] | None = (4, 1, 3)
    shard: tuple[int, ...] = (1, 3)
    differentiable: bool = True


ROWS = (
    Row("psum", lambda x: lax.psum(x, "i")),
    Row("psum of a number", lambda x: x * lax.psum(1, "i")),
    Row("pmean", lambda x: lax.pmean(x, "i")),
    Row("pmax", lambda x: lax.pmax(x, "i"), differentiable=False),
    Row("pmin", lambda x: lax.pmin(x, "i"), differentiable=False),
    Row("all_gather", lambda x: lax.all_gather(x, "i")),
    Row("all_gather in the middle", lambda x: lax.all_gather(x, "i", axis=1)),
    Row("all_gather, tiled", lambda x: lax.all_gather(x, "i", axis=1, tiled=True)),
    Row("axis_index", lambda x: x + lax.axis_index("i")),
    Row("axis_size", lambda x: x * lax.axis_size("i")),
    Row("ppermute", lambda x: lax.ppermute(x, "i", [(k, (k + 1) % lax.axis_size("i")) for k in range(lax.axis_size("i"))])),
    Row("ppermute to nobody", lambda x: lax.ppermute(x, "i", []), None),
    Row("psum_scatter", lambda x: lax.psum_scatter(x, "i"), (4, 4, 3)),
    Row("psum_scatter, tiled", lambda x: lax.psum_scatter(x, "i", scatter_dimension=1, tiled=True), (4, 2, 8)),
    Row("all_to_all", lambda x: lax.all_to_all(x, "i", 0, 1), (4, 4, 3), differentiable=False),
    Row("all_to_all, tiled", lambda x: lax.all_to_all(x, "i", 1, 0, tiled=True), (4, 2, 8)),
)


def on_lanes(fn: Any) -> Any:
    """Over an axis of several lanes on one chip."""
    return jax.vmap(fn, axis_name="i")


def on_shard(fn: Any) -> Any:
    """Over a mesh of one device."""
    return jax.shard_map(fn, mesh=MESH, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i"))


def on_replicas(fn: Any) -> Any:
    """Over the one device of a `pmap`, which is `shard_map` without its checks: [1, ...] -> [1, ...]."""
    return jax.pmap(lambda x: fn(x), axis_name="i")


def _squares(fn: Any) -> Any:
    return jax.grad(lambda x: jnp.sum(fn(x) ** 2))


WAYS: dict[str, tuple[Any, Callable[[Row], tuple[int, ...] | None]]] = {
    "vmap": (on_lanes, lambda row: row.lanes),
    "shard_map": (on_shard, lambda row: row.shard),
    "pmap": (on_replicas, lambda row: (1, *row.shard)),
}
TABLE = [(row, way) for row in ROWS for way in WAYS if WAYS[way][1](row) is not None]


@pytest.mark.parametrize(("row", "way"), TABLE, ids=[f"{way}: {row.name}" for row, way in TABLE])
def test_a_collective_is_that_of_plain_jax_on_both_engines_and_its_gradient_too(row: Row, way: str) -> None:
    around, shape_of = WAYS[way]
    x = RNG.normal(size=shape_of(row)).astype(np.float32)
    fn = around(row.fn)
    for function in (fn, _squares(fn)) if row.differentiable else (fn,):
        expected = jax.jit(function)(x)
        for engine in ("fast", "reference"):
            found = tpuflow.jit(function, engine=engine)(x)
            assert found.dtype == expected.dtype
            np.testing.assert_allclose(found, expected, **CLOSE)


@pytest.mark.parametrize("policy", ["mixed", "fp16"])
@pytest.mark.parametrize("way", WAYS)
def test_autocast_goes_into_shards_as_it_goes_into_calls(way: str, policy: str) -> None:
    around, _ = WAYS[way]
    w = RNG.normal(size=(8, 8)).astype(np.float32)
    x = RNG.normal(size=(4, 1, 8) if way == "vmap" else (1, 1, 8)).astype(np.float32)

    def shard(x: Any) -> Any:
        return lax.psum(jnp.tanh(x @ w), "i") + lax.all_gather(x @ w, "i", tiled=True).sum(0)

    def loss(x: Any) -> Any:
        return jnp.sum(around(shard)(x))

    cast = tpuflow.autocast(loss, policy)
    assert "f16" in str(jax.make_jaxpr(cast)(x))
    for function in (cast, jax.grad(cast)):
        np.testing.assert_allclose(tpuflow.jit(function)(x), jax.jit(function)(x), rtol=2e-3, atol=2e-3)


def test_a_function_on_the_device_sees_the_axes_around_its_call() -> None:
    """The same arguments under axes of other sizes are other programs."""
    centred = tpuflow.jit(lambda x: x - lax.pmean(x, "lane") + lax.axis_index("lane"))
    offset = tpuflow.jit(lambda y: y + lax.axis_index("lane") * lax.axis_size("lane"))
    for lanes in (2, 3):
        x = RNG.normal(size=(lanes, 3)).astype(np.float32)
        expected = x - x.mean(0) + np.arange(lanes)[:, None]
        np.testing.assert_allclose(jax.vmap(centred, axis_name="lane")(x), expected, **CLOSE)
        np.testing.assert_allclose(tpuflow.jit(jax.vmap(centred, axis_name="lane"))(x), expected, **CLOSE)
        np.testing.assert_allclose(jax.jit(jax.vmap(centred, axis_name="lane"))(x), expected, **CLOSE)
        np.testing.assert_array_equal(jax.vmap(lambda _: offset(1.0), axis_name="lane")(x), 1.0 + lanes * np.arange(lanes))


def test_axes_nest() -> None:
    def fn(x: Any) -> Any:
        return lax.psum(x, ("a", "b")) - lax.pmax(x, "a") + lax.pmean(x, ("b", "i"))

    def nested(x: Any) -> Any:
        return on_replicas(jax.vmap(jax.vmap(fn, axis_name="a"), axis_name="b"))(x)

    x = RNG.normal(size=(1, 4, 3, 5)).astype(np.float32)
    np.testing.assert_allclose(tpuflow.jit(nested)(x), jax.jit(nested)(x), **CLOSE)


def test_an_axis_around_a_plain_program_that_calls_the_device_is_refused() -> None:
    step = tpuflow.jit(lambda x: lax.psum(x, "i"))
    with pytest.raises(UnsupportedPrimitiveError, match=r"test_collectives.py.*'psum'.*\('i',\).*tpuflow\.jit\(jax\.pmap"):
        on_replicas(step)(np.ones((1, 3), np.float32))


class Normalised(nn.Module):
    """Batch statistics over the batch and over an axis, as in flax's examples: [B, 6] -> [B, 3]."""

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=not train, axis_name="batch")(x)
        return nn.Dense(3)(nn.relu(x))


OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def data_parallel_step(state: Any, batch: Any) -> Any:
    """A step as data-parallel examples write it: gradients, statistics and figures are means over the axis."""
    params, stats, opt_state = state

    def loss_fn(params: Any) -> Any:
        logits, updates = Normalised().apply({"params": params, "batch_stats": stats}, batch["x"], mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
        return loss, (logits, updates["batch_stats"])

    (loss, (logits, stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    grads = lax.pmean(grads, "batch")
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    figures = lax.pmean({"loss": loss, "accuracy": jnp.mean(jnp.argmax(logits, -1) == batch["y"])}, "batch")
    return (optax.apply_updates(params, updates), lax.pmean(stats, "batch"), opt_state), figures


def _begin(devices: int) -> tuple[Any, list[Any]]:
    variables = Normalised().init(jax.random.key(0), np.ones((4, 6), np.float32), train=False)
    state = (variables["params"], variables["batch_stats"], OPTIMIZER.init(variables["params"]))
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * devices), state)
    x, y = RNG.normal(size=(5, devices, 8, 6)).astype(np.float32), RNG.integers(0, 3, size=(5, devices, 8))
    return state, [{"x": a, "y": b.astype(np.int32)} for a, b in zip(x, y, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pmap on one device", "vmap on four"])
def test_a_data_parallel_training_runs_in_jit_and_in_sinks(way: str) -> None:
    devices, mapped = (1, jax.pmap) if "pmap" in way else (4, jax.vmap)
    step = mapped(data_parallel_step, axis_name="batch")
    initial, batches = _begin(devices)
    state, expected = initial, []
    for batch in batches:
        state, figures = jax.jit(step)(state, batch)
        expected.append(np.asarray(figures["loss"]))
    on_device, state = tpuflow.jit(step), initial
    for batch, loss in zip(batches, expected, strict=True):
        state, figures = on_device(state, batch)
        np.testing.assert_allclose(figures["loss"], loss, rtol=1e-5)
    sunk = [next(tpuflow.sink(step, batches, size, state=initial, epochs=1)) for size in (-1, 5)]
    for found in sunk:
        np.testing.assert_allclose(found.metrics["loss"], np.stack(expected), rtol=1e-5)
        assert jax.tree.all(jax.tree.map(np.array_equal, found.state, sunk[0].state))


class Sharded(nn.Module):
    """A layer under `shard_map`: [B, 6] -> [B, 3]."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        w = self.param("w", nn.initializers.lecun_normal(), (6, 4))
        specs = {"in_specs": (PartitionSpec("i"), PartitionSpec()), "out_specs": PartitionSpec()}
        x = jax.shard_map(lambda x, w: lax.pmean(jax.nn.gelu(x @ w), "i"), mesh=MESH, **specs)(x, w)
        return nn.Dense(3)(x)


class Plain(nn.Module):
    """`Sharded` without its mesh."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        w = self.param("w", nn.initializers.lecun_normal(), (6, 4))
        return nn.Dense(3)(jax.nn.gelu(x @ w))


DATA = (RNG.normal(size=(8, 6)).astype(np.float32), np.arange(8) % 3)


@pytest.mark.slow
def test_a_model_with_shards_of_one_device_trains_as_it_does_without() -> None:
    options = {"optimizer": optax.sgd(0.1), "batch_size": 4, "epochs": 3, "progress": False}
    found, expected = (tpuflow.train(model, DATA, "mixed", **options) for model in (Sharded(), Plain()))
    assert found.history[-1]["losses"] == expected.history[-1]["losses"]


@pytest.mark.slow
def test_numbers_inside_of_shards_are_measured() -> None:
    sharded = tpuflow.check_numerics(Sharded(), DATA, "fp32", optimizer=optax.sgd(0.1))
    assert {"dot_general", "tanh", "psum_invariant"} <= {o.primitive for o in sharded.operations if "test_collectives.py" in o.source}
