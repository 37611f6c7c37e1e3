"""Gradient accumulation: several micro-batches are one batch, whatever the policy, the sink, and the loss scale."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import tpuflow
from tests import tolerances
from tpuflow import amp
from tpuflow.compiler import PIPELINE, compile_graph
from tpuflow.device.runtime import Executable
from tpuflow.device.timing import time_program
from tpuflow.errors import ConfigError
from tpuflow.lower.importers.jaxpr.importer import lower_with_calls
from tpuflow.lower.passes.carry_converted import CarryConverted


class Net(nn.Module):
    """Two dense layers: [B, 7] -> [B, 3]."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(3)(nn.tanh(nn.Dense(8)(x)))


def blobs(samples: int = 96) -> tuple[np.ndarray, np.ndarray]:
    """The first samples of 96."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 3, 96)
    inputs = rng.normal(size=(3, 7))[labels] + rng.normal(size=(96, 7))
    return inputs[:samples].astype(np.float32), labels[:samples]


def fit(samples: int = 96, **options: Any) -> tpuflow.TrainResult:
    options = {"optimizer": optax.sgd(0.2, momentum=0.9), "batch_size": 8, "accumulate_steps": 3, "progress": False, **options}
    return tpuflow.train(Net(), blobs(samples), **options)


def same_bits(a: Any, b: Any) -> bool:
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.slow
def test_micro_batches_equal_one_big_batch_in_fp32():
    small, big = fit(), fit(batch_size=24, accumulate_steps=1)
    assert (small.steps, big.steps) == (12, 4)
    np.testing.assert_allclose(np.reshape(small.losses, (4, 3)).mean(1), big.losses, rtol=tolerances.ACCUMULATION)
    for a, b in zip(jax.tree.leaves(small.params), jax.tree.leaves(big.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerances.ACCUMULATION)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed", "fp16"])
def test_micro_batches_equal_one_big_batch_up_to_the_rounding_of_a_narrow_gradient(policy):
    small, big = fit(24, policy=policy, loss_scale=64), fit(24, policy=policy, loss_scale=64, batch_size=24, accumulate_steps=1)
    assert (small.skipped_steps, big.skipped_steps) == ([], [])
    for a, b in zip(jax.tree.leaves(small.params), jax.tree.leaves(big.params), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=0, atol=tolerances.ACCUMULATION_FP16)


@pytest.mark.slow
def test_sink_sizes_and_ragged_batches_change_no_bit():
    whole = fit(92, epochs=2, policy="mixed")  # 11 full batches and one of 4 samples an epoch
    assert whole.steps == 24
    for sink_size in (0, 5):
        epochs = 2 if sink_size == 0 else 5
        other = fit(92, epochs=epochs, policy="mixed", sink_size=sink_size)
        assert other.losses[:24] == whole.losses[: other.steps]
        if other.steps == 24:
            assert same_bits((other.params, other.opt_state), (whole.params, whole.opt_state))


@pytest.mark.slow
def test_what_is_left_over_waits_and_changes_nothing():
    five, three = fit(40), fit(24)
    assert (five.steps, three.steps) == (5, 3)
    assert same_bits(five.params, three.params)
    assert int(five.opt_state.count) == 2 and int(three.opt_state.count) == 0
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(three.opt_state.grads))
    assert any(np.asarray(g).any() for g in jax.tree.leaves(five.opt_state.grads))


def _gathering(w: Any, x: Any) -> Any:
    """Eight micro-batches and two updates, the forward pass computed again in the backward pass."""

    def loss(w: Any) -> Any:
        layer = jax.checkpoint(lambda w: jnp.sin(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)))
        return layer(w).astype(jnp.float32).sum()

    def micro_step(i: Any, carry: Any) -> Any:
        w, total, losses = carry
        value, grads = jax.value_and_grad(loss)(w)
        due = i % 4 == 3
        w = jax.lax.cond(due, lambda: w - 0.1 * (total + grads), lambda: w)
        return w, jnp.where(due, 0.0, total + grads), losses + value

    return jax.lax.fori_loop(0, 8, micro_step, (w, jnp.zeros_like(w), jnp.float32(0)))


@pytest.mark.slow
def test_weights_are_converted_once_an_update_and_no_bit_changes():
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in ((256, 256), (32, 256))]
    graph, _ = lower_with_calls(jax.make_jaxpr(_gathering)(*arrays), "gathering")
    without = tuple(step for step in PIPELINE if not isinstance(step, CarryConverted))
    programs = [compile_graph(graph, chip="generic", passes=passes) for passes in (PIPELINE, without)]
    carried, converted = (time_program(program).work.hbm_bytes for program in programs)
    assert carried <= converted - 5 * 2 * 256 * 256  # of the eight micro-batches, those after which nothing changes
    for engine, fidelity in (("reference", "bitexact"), ("fast", "bitexact"), ("fast", "native")):
        one, other = (Executable(p, engine=engine, fidelity=fidelity).launch(arrays)[0] for p in programs)
        assert [np.asarray(v).tobytes() for v in one] == [np.asarray(v).tobytes() for v in other], (engine, fidelity)


def test_while_gradients_gather_nothing_of_the_parameters_moves():
    step, state, batch = _steps(tpuflow.EMA(0.9))
    program = tpuflow.jit(step, chip="generic")
    after, _ = program(state, batch)
    minus = jax.tree.map(lambda p: jnp.full_like(p, -0.0), state.params)
    kept, _ = program(state._replace(params=minus), batch)
    assert same_bits(after.params, state.params) and same_bits(after.ema, state.ema) and same_bits(kept.params, minus)


def _steps(ema: Any) -> Any:
    batch = blobs(8)
    made = tpuflow.training_step(Net(), batch, optimizer=optax.adam(0.1), accumulate_steps=3, ema=ema)
    return made.step, made.state, batch


def _run(optimizer: Any, gradients: list[float]) -> tuple[list[float], Any]:
    """The parameter after each call, for gradients times the scale in force; it starts at -0.0."""
    params, values = {"w": jnp.array([-0.0])}, []
    state = optimizer.init(params)
    for g in gradients:
        found = amp.find_state(state)
        scale = 1.0 if found is None else found.scale
        updates, state = optimizer.update({"w": jnp.array([g]) * scale}, state, params)
        params = optax.apply_updates(params, updates)
        values.append(float(params["w"][0]))
    return values, state


def test_an_overflow_in_one_micro_batch_skips_the_whole_update_once():
    optimizer = amp.accumulate(amp.dynamic_loss_scale(optax.sgd(1.0, momentum=0.9), initial=8.0), 3)
    values, state = _run(optimizer, [1.0, np.inf, 1.0, 1.0, 1.0, 4.0])
    assert values == [0.0, 0.0, 0.0, 0.0, 0.0, -2.0]
    assert str(values[2]) == "-0.0"  # not a bit of it changes
    found = amp.find_state(state)
    assert (float(found.scale), int(found.skipped), int(found.good_steps)) == (4.0, 1, 1)


def test_a_training_tells_the_skipped_update_at_the_step_that_was_due():
    result = fit(policy="mixed", loss_scale=amp.LossScale("dynamic", initial=2.0**24))
    skipped, scales = result.skipped_steps, result.history[0]["loss_scale"]
    assert skipped and all(step % 3 == 2 for step in skipped)
    assert [scales[i] for i in range(0, 12, 3)] == [2.0 ** (24 - sum(s < i for s in skipped)) for i in range(0, 12, 3)]
    assert all(scales[i] == scales[i - i % 3] for i in range(12))


def test_schedules_count_updates_and_see_the_mean_loss():
    seen: list[float] = []

    def update(updates: Any, state: Any, params: Any = None, *, value: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda u: -u * state, updates), state * 0.5 + 0.0 * jax.pure_callback(_note(seen), value, value)

    inner = optax.GradientTransformationExtraArgs(lambda params: jnp.float32(1.0), update)
    optimizer = amp.accumulate(inner, 2)
    params = {"w": jnp.zeros(1)}
    state = optimizer.init(params)
    for gradient, loss in ((1.0, 3.0), (3.0, 5.0), (2.0, 1.0), (2.0, 2.0)):
        updates, state = optimizer.update({"w": jnp.array([gradient])}, state, params, value=jnp.float32(loss))
        params = optax.apply_updates(params, updates)
    assert seen == [4.0, 1.5]
    assert params["w"].tolist() == [-3.0]


def _note(seen: list[float]) -> Any:
    def note(value: Any) -> Any:
        seen.append(float(value))
        return np.asarray(value)

    return note


def test_half_gradients_are_summed_in_fp32_and_handed_on_as_half():
    types: list[Any] = []

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        types.append(updates["w"].dtype)
        return updates, state

    optimizer = amp.accumulate(optax.GradientTransformation(lambda params: optax.EmptyState(), update), 4)
    params = {"w": jnp.zeros(1, jnp.float16)}
    state = optimizer.init(params)
    for gradient in (60000.0, 60000.0, 1.0, 1.0):  # fp16 sums would be infinite
        updates, state = optimizer.update({"w": jnp.array([gradient], jnp.float16)}, state, params)
    assert set(types) == {jnp.dtype(jnp.float16)} and updates["w"].tolist() == [30000.0]


def test_batch_statistics_move_with_every_micro_batch():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool = False) -> Any:
            return nn.Dense(3)(nn.BatchNorm(use_running_average=not train, momentum=0.5)(x))

    x, y = blobs(16)
    result = tpuflow.train(Normed(), (x, y), batch_size=8, accumulate_steps=2, optimizer=optax.sgd(0.1), progress=False)
    (mean,) = (s["mean"] for s in result.carried["batch_stats"].values())
    np.testing.assert_allclose(mean, 0.25 * x[:8].mean(0) + 0.5 * x[8:].mean(0), rtol=1e-5, atol=1e-6)


def test_the_number_of_steps_for_an_update_rises_in_a_warm_up():
    plan = amp.Accumulation(3.4, warmup=6, total=True)
    assert plan.needed.tolist() == [1, 1, 2, 2, 3, 3, 3]  # 1, 1.4, 1.8, 2.2, 2.6, 3, 3.4, rounded
    assert plan.updates(13).tolist() == [0, 1, 3, 6, 9, 12]
    optimizer = amp.accumulate(optax.sgd(1.0), plan)
    params, update = {"w": jnp.zeros(1)}, jax.jit(optimizer.update)
    state, seen = optimizer.init(params), []
    for step in range(13):
        updates, state = update({"w": jnp.full(1, 2.0**step)}, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(-float(params["w"][0]))
    ends = plan.updates(13)
    assert seen == [2.0 ** (ends[ends <= step].max() + 1) - 1 for step in range(13)]  # the sum of all gradients that were due


@pytest.mark.slow
def test_a_training_with_a_warm_up_of_accumulation_goes_on_bit_for_bit(tmp_path):
    options = {"accumulate_steps": amp.Accumulation(4, warmup=9)}
    whole = fit(epochs=2, **options)
    fit(epochs=1, callbacks=[tpuflow.ModelCheckpoint(tmp_path)], **options)
    resumed = fit(epochs=2, resume=tmp_path, **options)
    assert resumed.losses == whole.losses and same_bits((resumed.params, resumed.opt_state), (whole.params, whole.opt_state))
    assert int(whole.opt_state.step) == 24
    assert whole.settings["accumulate_steps"] == "Accumulation(steps=4, warmup=9, total=False)"


@pytest.mark.parametrize("bad", [{"steps": 0.4}, {"steps": "4"}, {"steps": 4, "warmup": -1}, {"steps": 4, "warmup": 1.5}])
def test_an_accumulation_that_cannot_be_is_refused(bad):
    with pytest.raises(ConfigError, match="Accumulation: expected"):
        amp.Accumulation(**bad)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, None])
def test_a_number_of_steps_that_is_none_is_refused(bad):
    with pytest.raises(ConfigError, match="accumulate_steps: expected a whole number of at least 1"):
        fit(accumulate_steps=bad)
