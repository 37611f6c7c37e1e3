"""tpuflow.train: models, data, sinks, callbacks, evaluation, results; small networks on the simulated device."""

from __future__ import annotations

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import tpuflow
from tpuflow import amp
from tpuflow.data.epochs import EpochIterator
from tpuflow.data.feeding import make_feed
from tpuflow.errors import DataError
from tpuflow.training.losses import LOSSES


class Net(nn.Module):
    """Two dense layers: [B, ...] -> [B, 3]."""

    hidden: int = 16

    @nn.compact
    def __call__(self, x):
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(self.hidden)(x))
        return nn.Dense(3)(x)


class NnxNet(nnx.Module):
    """The same as an nnx module."""

    def __init__(self, rngs):
        self.first = nnx.Linear(7, 16, rngs=rngs)
        self.last = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


def blobs(samples=43, features=7, seed=0):
    """Three clusters that a small network learns quickly."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, samples)
    centres = rng.normal(size=(3, features)) * 3
    return (centres[labels] + rng.normal(size=(samples, features))).astype(np.float32), labels


def fit(model=None, data=None, **options):
    """`tpuflow.train` without progress bar; plain SGD, batches of 16."""
    options = {"optimizer": optax.sgd(0.1), "batch_size": 16, "progress": False, **options}
    return tpuflow.train(Net() if model is None else model, blobs() if data is None else data, **options)


def same_bits(a, b):
    """Whether two trees hold the same bits."""
    leaves_a, leaves_b = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(leaves_a) == len(leaves_b) and all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(leaves_a, leaves_b, strict=True)
    )


def plain_jax(data, epochs=1, batch_size=16, lr=0.1, seed=0):
    """Losses and parameters of the same fp32 training written with JAX and Optax only."""
    model, optimizer = Net(), optax.sgd(lr)
    params = model.init(jax.random.split(jax.random.split(jax.random.key(seed))[0])[0], jnp.zeros((batch_size, 7)))["params"]
    state = optimizer.init(params)

    def loss_of(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply({"params": params}, x), y).mean()

    losses = []
    for _ in range(epochs):
        for i in range(0, len(data[0]), batch_size):
            loss, grads = jax.value_and_grad(loss_of)(params, data[0][i : i + batch_size], data[1][i : i + batch_size])
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            losses.append(float(loss))
    return losses, params


# --- values -----------------------------------------------------------------------------------------------------------


def test_a_training_without_options_works_and_says_what_it_chose(capsys):
    result = tpuflow.train(Net(), blobs(64), policy="mixed")
    assert result.chosen == {"loss": "softmax_cross_entropy (integer labels)", "optimizer": "adam(1e-3)", "batch_size": "32"}
    assert "adam(1e-3)" in capsys.readouterr().err
    assert "chosen: loss softmax_cross_entropy (integer labels), optimizer adam(1e-3)" in result.report()
    assert result.steps == 2


def test_fp32_training_follows_plain_jax():
    losses, params = plain_jax(blobs(), epochs=3)
    result = fit(epochs=3)
    np.testing.assert_allclose(result.losses, losses, rtol=2e-5)
    for ours, theirs in zip(jax.tree.leaves(result.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_nnx_and_linen_modules_train_alike():
    module = NnxNet(nnx.Rngs(0))
    kernels = {f"Dense_{i}": {"kernel": layer.kernel[...], "bias": layer.bias[...]} for i, layer in enumerate((module.first, module.last))}
    from_nnx, from_linen = fit(module, epochs=2), fit(params=kernels, epochs=2)
    assert from_nnx.losses == from_linen.losses
    assert from_nnx.settings["model"] == "NnxNet"


def test_float_labels_are_regressed():
    x, _ = blobs()
    result = fit(data=(x, np.stack([x.sum(1), x[:, 0], x[:, 1]], 1)), optimizer=optax.adam(0.01), epochs=20, eval_data=None)
    assert result.settings["loss"] == "mse"
    assert result.losses[-1] < 0.3 * result.losses[0]


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_named_loss_trains(name):
    x, y = blobs(32)
    labels = y if LOSSES[name].classes else np.eye(3, dtype=np.float32)[y]
    result = fit(data=(x, labels), loss=name, epochs=2, optimizer=optax.sgd(0.02))
    assert result.losses[-1] < result.losses[0]
    assert not result.nan_steps


def test_a_loss_of_the_users_own_is_averaged_over_examples():
    def margin(outputs, labels):
        return jnp.maximum(0.0, 1.0 - outputs[:, 0] * labels)

    x, y = blobs(32)
    result = fit(data=(x, np.where(y == 0, 1.0, -1.0).astype(np.float32)), loss=margin)
    assert result.settings["loss"] == "margin"
    assert np.isfinite(result.losses).all()


def test_softmax_cross_entropy_is_the_textbook_one():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)) * 10, jnp.float32)
    labels = jnp.array([0, 3, 1, 1, 2])
    want = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    np.testing.assert_allclose(LOSSES["softmax_cross_entropy"].fn(logits, labels), want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("policy", list(amp.POLICIES))
def test_every_policy_trains_on_both_engines_alike(policy):
    options = {"policy": policy, "data": blobs(32), "epochs": 2, "eval_data": blobs(32) if policy == "mixed" else None}
    fast, reference = fit(fidelity="bitexact", **options), fit(engine="reference", **options)
    assert fast.history == reference.history
    assert same_bits(fast.params, reference.params)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(fast.params)} == {amp.get_policy(policy).param_dtype}


@pytest.mark.slow
def test_dropout_and_batch_norm_are_carried():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool = False):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))
            return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(nn.relu(x)))

    first, second = fit(Noisy(), epochs=2, eval_data=blobs()), fit(Noisy(), epochs=2, eval_data=blobs(), sink_size=0)
    assert first.losses == second.losses and same_bits(first.carried, second.carried)
    assert float(jnp.abs(first.carried["batch_stats"]["BatchNorm_0"]["mean"]).max()) > 0
    assert first.losses != fit(Noisy(), epochs=2, seed=1, params=first.params).losses


@pytest.mark.slow
def test_an_nnx_module_keeps_its_random_streams_and_statistics():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.first, self.last = nnx.Linear(7, 16, rngs=rngs), nnx.Linear(16, 3, rngs=rngs)
            self.norm, self.dropout = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))

    module, again = Noisy(nnx.Rngs(0)), Noisy(nnx.Rngs(0))
    first, second = fit(module, epochs=2, eval_data=blobs()), fit(again, epochs=2, eval_data=blobs(), sink_size=0)
    assert first.losses == second.losses
    module.eval()
    hits = (np.asarray(module(blobs()[0])).argmax(-1) == blobs()[1]).mean()
    assert first.history[-1]["accuracy"] == pytest.approx(100 * hits)
    assert module.dropout.rngs.count[...] == 6


def test_the_first_mixed_step_overflows_and_its_whole_history_is_kept():
    result = fit(policy="mixed", epochs=2)
    scales = [scale for epoch in result.history for scale in epoch["loss_scale"]]
    skipped = [skipped for epoch in result.history for skipped in epoch["skipped"]]
    assert scales[0] == 65536.0 and skipped[0] and not all(skipped)
    assert scales[1:] == [scale / 2 if skip else scale for scale, skip in zip(scales, skipped, strict=True)][:-1]
    assert f"{sum(skipped)} steps skipped (steps 1" in result.report()


def test_training_starts_from_given_parameters():
    trained = fit(epochs=2)
    again = fit(params=trained.variables, epochs=1)
    assert again.losses == fit(params=trained.params, epochs=1).losses
    assert again.losses[0] < fit().losses[0]


def test_seeds_decide_initial_parameters_and_shuffling():
    assert fit(seed=3).losses == fit(seed=3).losses != fit(seed=4).losses
    shuffled = fit(shuffle=True, epochs=2)
    assert shuffled.losses != fit(epochs=2).losses
    assert shuffled.losses == fit(shuffle=True, epochs=2).losses


# --- data -------------------------------------------------------------------------------------------------------------


class Loader:
    """A loader as PyTorch's or Grain's: iterable again and again, batches as mappings."""

    def __init__(self, data, size):
        self.data, self.size = data, size

    def __iter__(self):
        for i in range(0, len(self.data[0]), self.size):
            yield {"image": self.data[0][i : i + self.size], "label": self.data[1][i : i + self.size]}


@pytest.mark.parametrize("form", ["list", "function", "loader", "float64", "jax"])
def test_every_form_of_data_trains_alike(form):
    x, y = blobs()
    batches = [(x[i : i + 16], y[i : i + 16]) for i in range(0, len(x), 16)]
    data = {
        "list": batches,
        "function": lambda: iter(batches),
        "loader": Loader((x, y), 16),
        "float64": (x.astype(np.float64), y.astype(np.int64)),
        "jax": (jnp.asarray(x), jnp.asarray(y)),
    }[form]
    assert fit(data=data, epochs=2).losses == fit(epochs=2).losses


def test_a_one_pass_iterator_serves_one_epoch_and_then_says_so():
    x, y = blobs()
    batches = [(x[i : i + 16], y[i : i + 16]) for i in range(0, len(x), 16)]
    assert fit(data=iter(batches)).steps == 3
    with pytest.raises(DataError, match="gives no batch in epoch 2.*pass a list") as caught:
        fit(data=iter(batches), epochs=2)
    assert caught.value.result.steps == 3


def test_an_endless_walk_crosses_epochs_in_order():
    feed = make_feed((np.arange(10, dtype=np.float32), np.arange(10)), 4)
    iterator, seen = EpochIterator(feed), []
    for _ in range(4):
        for piece in iterator.chunks(2):
            seen += np.asarray(piece.arrays[1][piece.start : piece.start + piece.count]).ravel().tolist()
    assert seen == [*range(10), *range(10), *range(8)]


def test_large_arrays_are_fed_in_chunks_of_one_shape(monkeypatch):
    monkeypatch.setattr("tpuflow.data.chunks.INFEED_BYTES", 3 * 4 * 8)
    feed = make_feed((np.arange(46, dtype=np.float32), np.arange(46)), 4)
    chunks = list(feed.epoch(0))
    assert {c.arrays[0].shape for c in chunks} == {(3, 4), (1, 2)}
    seen = [v for c in chunks for v in np.asarray(c.arrays[1][c.start : c.start + c.count]).ravel().tolist()]
    assert seen == list(range(46))
    assert [c.samples for c in chunks] == [0, 12, 24, 36, 44]
    monkeypatch.setattr("tpuflow.data.chunks.INFEED_BYTES", 16 * 32 * 2)
    chunked = fit(epochs=2).losses
    monkeypatch.undo()
    assert chunked == fit(epochs=2).losses


# --- evaluation and results -------------------------------------------------------------------------------------------


def test_evaluation_counts_every_sample_and_averages_over_batches():
    data = blobs(43)
    result = fit(epochs=2, eval_data=data)
    logits = Net().apply({"params": result.params}, data[0])
    hits = int((np.asarray(logits).argmax(-1) == data[1]).sum())
    losses = [float(LOSSES["softmax_cross_entropy"](logits[i : i + 16], data[1][i : i + 16])) for i in range(0, 43, 16)]
    assert result.history[-1]["accuracy"] == pytest.approx(100 * hits / 43)
    assert result.history[-1]["avg_loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_nan_inputs_are_reported_and_not_fatal():
    x, y = blobs()
    x[20] = np.nan
    result = fit(data=(x, y), epochs=1)
    assert result.nan_steps == [1, 2]
    assert "2 steps had a loss that is not a finite number, the first was step 2" in result.report()
    mixed = fit(data=(x, y), policy="mixed")
    assert mixed.nan_steps == [1] and mixed.skipped_steps[:2] == [0, 1]


def test_the_result_is_written_as_json(tmp_path):
    path = tmp_path / "out.json"
    x, y = blobs()
    x[20] = np.nan
    result = fit(data=(x, y), policy="mixed", eval_data=blobs(), json=path)
    read = json.loads(path.read_text())
    assert read["history"][0]["losses"][0] == result.losses[0]
    assert read["history"][0]["losses"][1] == "nan" and read["nan_steps"] == [1]
    assert read["history"][0]["loss_scale"] == [65536.0, 32768.0, 16384.0]
    assert (read["settings"]["policy"], read["round_trips"], read["interrupted"]) == ("mixed", 1, False)
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_training_says_that_a_chip_has_no_f32_products():
    batch = np.ones((4, 4), np.float32), np.zeros(4, np.int32)
    reports = {
        chip: tpuflow.train(nn.Dense(3), batch, batch_size=4, chip=chip, progress=False).report() for chip in ("ascend910", "generic")
    }
    assert "f32 products enter the arrays of ascend910 as f16, in 1 pass" in reports["ascend910"] and "f32 prod" not in reports["generic"]


@pytest.mark.parametrize(("policy", "options", "within"), [("fp32", {}, 1e-6), ("mixed", {"loss_scale": 64.0}, 2**-10)])
def test_the_step_alone_is_the_one_that_is_trained(policy, options, within):
    """Sums of XLA:CPU are in another order; a loss in fp16 (below 2) may then be rounded to its neighbour."""
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(16, 4)).astype(np.float32), rng.integers(0, 3, 16).astype(np.int32)
    made = tpuflow.training_step(nn.Dense(3), batch, policy, optax.sgd(0.5), seed=3, **options)
    both = {"batch_size": 16, "epochs": 2, "engine": "reference", "progress": False, **options}
    trained = tpuflow.train(nn.Dense(3), batch, policy, optax.sgd(0.5), seed=3, **both)
    step, state, losses = jax.jit(made.step), made.state, []
    for _ in trained.losses:
        state, figures = step(state, batch)
        losses.append(figures.loss)
    np.testing.assert_allclose(losses, trained.losses, rtol=0, atol=within)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=0, atol=within), state.params, trained.params)
    assert made.outputs(made.state, batch).shape == (16, 3)
    assert float(made.evaluate(state, batch)["accuracy"][1]) == 16
