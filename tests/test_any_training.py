"""Trainings of every kind: each beside plain jax.jit of the same step, in any sink, and resumed from a checkpoint bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import tpuflow
from tpuflow.training.config import StepConfig

N, BATCH, EPOCHS = 24, 8, 7
RNG = np.random.default_rng(7)
X = RNG.normal(size=(N, 12)).astype(np.float32)
Y = RNG.integers(0, 4, N).astype(np.int32)


class Dense(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(nn.relu(nn.Dense(16, name="trunk")(x)))


# A line search decides by comparing losses. Were each batch another objective, or one with its minimum at infinity, a decision would hang
# on the last bit of a sum and with it on the order in which the host's CPU sums; on one batch and a loss with a minimum none does.
REPEATED = (np.tile(X[:BATCH], (N // BATCH, 1)), np.tile(Y[:BATCH], N // BATCH))


def smoothed(logits, labels):
    return jnp.mean(optax.losses.softmax_cross_entropy(logits, optax.losses.smooth_labels(jax.nn.one_hot(labels, 4), 0.2)))


class VAE(nn.Module):
    """An encoder and a decoder with noise from a stream of its own."""

    def setup(self):
        self.encoder, self.decoder = nn.Dense(6), nn.Dense(12)

    def __call__(self, x):
        mean, log_variance = jnp.split(self.encoder(x), 2, axis=-1)
        noise = jax.random.normal(self.make_rng("latent"), mean.shape)
        return self.decoder(mean + noise * jnp.exp(0.5 * log_variance)), mean, log_variance


def elbo(outputs, x):
    decoded, mean, log_variance = outputs
    divergence = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), axis=-1)
    return jnp.mean(jnp.sum((decoded - x) ** 2, axis=-1) + divergence)


class Experts(nn.Module):
    """A mixture of experts that sows how unevenly they are used."""

    @nn.compact
    def __call__(self, x):
        gates = nn.softmax(nn.Dense(3)(x))
        self.sow("losses", "balance", 0.01 * 3 * jnp.sum(jnp.mean(gates, axis=0) ** 2))
        self.sow("intermediates", "gates", gates)
        experts = jnp.stack([nn.Dense(4, name=f"expert{i}")(x) for i in range(3)], axis=1)
        return jnp.sum(gates[..., None] * experts, axis=1)


class Student(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Dense(name="student")(x), Dense(name="teacher")(x)


def distilled(outputs, labels):
    student, teacher = outputs
    soft = optax.losses.kl_divergence(nn.log_softmax(student), nn.softmax(jax.lax.stop_gradient(teacher)))
    return jnp.mean(soft + optax.losses.softmax_cross_entropy_with_integer_labels(student, labels))


def contrastive(apply, params, batch, rngs):
    a, b = apply(params, batch["left"]), apply(params, batch["right"])
    a, b = (v / jnp.sqrt(jnp.sum(v**2, axis=-1, keepdims=True) + 1e-6) for v in (a, b))
    similar = a @ b.T / 0.1
    loss = jnp.mean(jax.nn.logsumexp(similar, axis=-1) - jnp.diagonal(similar))
    return loss, {"agreement": jnp.mean(jnp.argmax(similar, axis=-1) == jnp.arange(len(a)))}


class Detector(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.Dense(16)(images))
        return {"boxes": nn.Dense(3 * 4)(x).reshape(-1, 3, 4), "scores": nn.Dense(3)(x)}


def detection(outputs, targets):
    mask = targets["mask"].astype(jnp.float32)
    boxes = jnp.sum(mask[..., None] * jnp.abs(outputs["boxes"] - targets["boxes"])) / jnp.maximum(1.0, jnp.sum(mask))
    return boxes + jnp.mean(optax.losses.sigmoid_binary_cross_entropy(outputs["scores"], mask))


class Recurrent(nn.Module):
    """A language model whose cell's state is carried from batch to batch."""

    @nn.compact
    def __call__(self, tokens):
        cell = nn.OptimizedLSTMCell(8)
        state = self.variable("memory", "state", lambda: (jnp.zeros((tokens.shape[0], 8)), jnp.zeros((tokens.shape[0], 8))))
        carry, outputs = state.value, []
        embedded = nn.Embed(9, 8)(tokens)
        for t in range(tokens.shape[1]):
            carry, out = cell(carry, embedded[:, t])
            outputs.append(out)
        if not self.is_initializing():
            state.value = jax.tree.map(jax.lax.stop_gradient, carry)
        return nn.Dense(9)(jnp.stack(outputs, axis=1))


class Noisy(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.norm = nnx.Linear(12, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.dropout, self.last = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def gan(state, batch):
    """One step of each of two players with an optimizer of its own."""
    real, noise = batch

    def made(generator):
        return noise @ generator["w"] + generator["b"]

    def judged(critic, x):
        return jnp.tanh(x @ critic["w"]) @ critic["v"]

    def critic_loss(critic):
        return jnp.mean(jax.nn.softplus(-judged(critic, real)) + jax.nn.softplus(judged(critic, made(state["generator"]))))

    def generator_loss(generator):
        return jnp.mean(jax.nn.softplus(-judged(state["critic"], made(generator))))

    new, losses = {}, {}
    for name, loss, optimizer in (("critic", critic_loss, CRITIC), ("generator", generator_loss, GENERATOR)):
        losses[name], grads = jax.value_and_grad(loss)(state[name])
        updates, new[f"{name}_opt"] = optimizer.update(grads, state[f"{name}_opt"], state[name])
        new[name] = optax.apply_updates(state[name], updates)
    return new, {"loss": losses["critic"] + losses["generator"], **losses}


CRITIC, GENERATOR = optax.adam(1e-2), optax.sgd(3e-2, momentum=0.9)


def players() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape).astype(np.float32) * 0.3)

    made = {"critic": {"w": draw(12, 8), "v": draw(8)}, "generator": {"w": draw(5, 12), "b": jnp.zeros(12)}}
    return {**made, "critic_opt": CRITIC.init(made["critic"]), "generator_opt": GENERATOR.init(made["generator"])}


@dataclass(frozen=True)
class Case:
    """What `tpuflow.train` gets; losses agree with plain jax.jit within `rtol`."""

    model: Callable[[], Any]
    data: Any
    options: Callable[[], Mapping[str, Any]] = field(default=dict)
    rtol: float = 2e-5


TOKENS = RNG.integers(0, 9, (N, 4)).astype(np.int32)
BOXES = {"boxes": RNG.normal(size=(N, 3, 4)).astype(np.float32), "mask": RNG.integers(0, 2, (N, 3)).astype(bool)}

CASES = {
    "a VAE with a random stream of its own": Case(VAE, X, lambda: {"loss": elbo}),
    "a GAN, a step of one's own with two optimizers": Case(
        lambda: gan, (X, RNG.normal(size=(N, 5)).astype(np.float32)), lambda: {"state": players()}
    ),
    "a mixture of experts with a balance loss": Case(Experts, (X, Y)),
    "distillation with a frozen teacher": Case(Student, (X, Y), lambda: {"loss": distilled, "frozen": ("teacher/*",)}),
    "contrastive pairs": Case(Dense, {"left": X, "right": X + 0.1}, lambda: {"loss_fn": contrastive, "inputs": "left"}),
    "detection with masks": Case(Detector, (X, BOXES), lambda: {"loss": detection}),
    "an LSTM language model with carried state": Case(Recurrent, (TOKENS[:, :-1], TOKENS[:, 1:])),
    "lbfgs with line search": Case(Dense, REPEATED, lambda: {"optimizer": optax.lbfgs(), "loss": smoothed}),
    "EMA with parameter groups": Case(
        Dense,
        {"x": X, "label": Y},
        lambda: {
            "optimizer": tpuflow.param_groups(
                {"trunk/*": None, "*/bias": optax.sgd(optax.linear_schedule(0.1, 0.0, 60)), "*": optax.adamw(1e-2, weight_decay=1e-3)}
            ),
            "ema": tpuflow.EMA(0.9, warmup=3),
            "eval_data": {"x": X, "label": Y},
        },
    ),
    "an nnx module in place": Case(Noisy, (X, Y), rtol=1e-4),
}


def trained(case: Case, **options: Any) -> tpuflow.TrainResult:
    return tpuflow.train(case.model(), case.data, **{"batch_size": BATCH, "epochs": EPOCHS, "progress": False, **case.options(), **options})


def cut(data: Any, samples: slice) -> Any:
    return jax.tree.map(lambda a: a[samples], data)


def plain_losses(case: Case) -> list[float]:
    """The same step under plain jax.jit, batch after batch."""
    given = dict(case.options())
    batches = [cut(case.data, slice(i, i + BATCH)) for _ in range(EPOCHS) for i in range(0, N, BATCH)]
    if "state" in given:
        state, step, losses = given["state"], jax.jit(gan), []
        for batch in batches:
            state, found = step(state, batch)
            losses.append(float(found["loss"]))
        return losses
    given.pop("eval_data", None)
    made = tpuflow.training_step(case.model(), batches[0], **given)
    state, step, losses = made.state, jax.jit(made.step), []
    for batch in batches:
        state, figures = step(state, batch)
        losses.append(float(figures.loss))
    return losses


def same_bits(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        words = [np.asarray(jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v) for v in (x, y)]
        np.testing.assert_array_equal(*words)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_training_agrees_with_plain_jax_in_any_sink_and_goes_on_from_a_checkpoint_bit_for_bit(name, tmp_path):
    case = CASES[name]
    whole = trained(case)
    np.testing.assert_allclose(whole.losses, plain_losses(case), rtol=case.rtol)
    for sink_size, epochs in ((0, EPOCHS), (7, EPOCHS * N // BATCH // 7)):
        other = trained(case, sink_size=sink_size, epochs=epochs, callbacks=[tpuflow.ModelCheckpoint(tmp_path)] if sink_size else [])
        assert other.losses == whole.losses
        same_bits((other.params, other.carried, other.opt_state), (whole.params, whole.carried, whole.opt_state))
    resumed = trained(case, resume=tmp_path / "step_00000007")
    assert resumed.resumed_at == 7, "in the third pass"
    assert resumed.losses == whole.losses
    same_bits((resumed.params, resumed.carried, resumed.opt_state), (whole.params, whole.carried, whole.opt_state))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kept"), [("distillation with a frozen teacher", "teacher"), ("EMA with parameter groups", "trunk")], ids=["frozen", "groups"]
)
def test_parameters_that_are_frozen_or_in_a_group_without_an_optimizer_stay_as_they_are(name, kept):
    case, key = CASES[name], jax.random.split(jax.random.split(jax.random.key(0))[0])[0]
    before, after = case.model().init({"params": key}, X[:1])["params"], trained(case).params
    same_bits(after[kept], before[kept])
    for path, leaf in jax.tree_util.tree_leaves_with_path({n: tree for n, tree in after.items() if n != kept}):
        assert (leaf != dict(jax.tree_util.tree_leaves_with_path(before))[path]).any(), path


@pytest.mark.slow
def test_the_average_follows_its_formula_and_is_what_is_evaluated():
    case, key = CASES["EMA with parameter groups"], jax.random.split(jax.random.split(jax.random.key(0))[0])[0]
    result = trained(case, epochs=1)
    seen = [trained(case, sink_size=n, epochs=1).params for n in range(1, N // BATCH + 1)]
    before = Dense().init({"params": key}, X[:1])["params"]
    average = jax.tree.map(lambda p: np.asarray(p, np.float64), before)
    for t, params in enumerate(seen, 1):
        d = 0.9 * (1 - np.exp(-t / 3))
        average = jax.tree.map(lambda a, p, d=d: d * a + (1 - d) * np.asarray(p, np.float64), average, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), result.ema, average)
    logits = Dense().apply({"params": result.ema}, X)
    assert result.history[-1]["accuracy"] == pytest.approx(100 * float(np.mean(np.argmax(logits, -1) == Y)))
    assert result.evaluate({"x": X, "label": Y}, progress=False)["accuracy"] == result.history[-1]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"policy": "mixed", "accumulate_steps": 3, "frozen": ("trunk/*",)}], ids=["plain", "wrapped"])
def test_parameters_that_the_optimizer_averages_are_evaluated_predicted_with_and_saved(options, tmp_path):
    data, averaged = {"x": X, "label": Y}, optax.contrib.schedule_free_eval_params
    settings = {"batch_size": BATCH, "epochs": 4, "eval_data": data, "eval_params": averaged, "progress": False, **options}
    result = tpuflow.train(Dense(), data, optimizer=optax.contrib.schedule_free_sgd(0.5), **settings)
    part = {name: tree for name, tree in result.params.items() if not (options and name == "trunk")}
    z = {name: tree for name, tree in tpuflow.amp.optimizer_state(result.opt_state).z.items() if name in part}
    expected = result.params | jax.tree.map(lambda y, z: (y - 0.1 * z) / 0.9, part, z)
    result.save(tmp_path / "saved")
    saved = tpuflow.load_params(tmp_path / "saved", result.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), saved, expected)
    logits = Dense().apply({"params": expected}, X)
    np.testing.assert_allclose(result.predict(X, progress=False), logits, atol=2e-2 if options else 1e-5)
    if not options:
        assert result.history[-1]["accuracy"] == pytest.approx(100 * float(np.mean(np.argmax(logits, -1) == Y)))
    assert result.history[-1]["accuracy"] == result.evaluate(data, progress=False)["accuracy"]


class Whitened(nn.Module):
    """A dense layer of normalised inputs: [B, 12] -> [B, 4]."""

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        return nn.Dense(4)(nn.BatchNorm(use_running_average=not train, momentum=0.5)(x))


@pytest.mark.slow
def test_statistics_are_averaged_with_the_parameters_if_that_is_asked_for(tmp_path):
    options: dict[str, Any] = {"batch_size": BATCH, "progress": False, "eval_data": (X, Y)}
    ema = tpuflow.EMA(0.9, statistics=True)
    result = tpuflow.train(Whitened(), (X, Y), ema=ema, callbacks=[tpuflow.ModelCheckpoint(tmp_path / "run")], **options)
    seen = [tpuflow.train(Whitened(), (X, Y), ema=ema, sink_size=n, **options).variables for n in range(1, N // BATCH + 1)]
    average: Any = {"BatchNorm_0": {"mean": np.zeros(X.shape[1]), "var": np.ones(X.shape[1])}}
    for variables in seen:
        average = jax.tree.map(lambda a, v: 0.9 * a + 0.1 * np.asarray(v, np.float64), average, variables["batch_stats"])
    result.save(tmp_path / "saved")
    saved, kept = (
        tpuflow.load_params(tmp_path / name, like=result.variables, **more) for name, more in (("saved", {}), ("run", {"average": True}))
    )
    same_bits(saved, kept)
    same_bits(kept["params"], result.ema)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), kept["batch_stats"], average)
    logits = Whitened().apply(kept, X)
    assert result.history[-1]["accuracy"] == pytest.approx(100 * float(np.mean(np.argmax(logits, -1) == Y)))
    plain = tpuflow.load_params(tmp_path / "run", like=result.variables)
    same_bits(plain, result.variables)


def test_an_average_that_was_not_kept_cannot_be_read(tmp_path):
    result = tpuflow.train(Dense(), (X, Y), batch_size=BATCH, progress=False, callbacks=[tpuflow.ModelCheckpoint(tmp_path / "run")])
    with pytest.raises(tpuflow.errors.WeightsError, match="no average of the parameters was kept"):
        tpuflow.load_params(tmp_path / "run", like=result.variables, average=True)
    result.save(tmp_path / "saved")
    with pytest.raises(tpuflow.errors.WeightsError, match="and this is none"):
        tpuflow.load_params(tmp_path / "saved", like=result.variables, average=True)


def test_inputs_may_be_computed_from_the_batch():
    data = {"pixels": np.round(100 * X).astype(np.int32), "y": Y}
    options: dict[str, Any] = {"batch_size": BATCH, "progress": False}
    found = tpuflow.train(Dense(), data, inputs=lambda batch: batch["pixels"].astype(jnp.float32) / 100, **options)
    assert found.losses == tpuflow.train(Dense(), {"x": np.round(100 * X).astype(np.float32) / 100, "y": Y}, **options).losses


def test_what_a_checkpoint_says_of_a_function_is_the_same_in_every_process():
    config = StepConfig(Dense(), (X, Y), ema=tpuflow.EMA(lambda updates: 0.9))
    assert "function" in config.same()["ema"] and "0x" not in config.same()["ema"]


def test_an_nnx_module_has_the_trained_variables_in_the_end():
    module = Noisy()
    result = tpuflow.train(module, (X, Y), batch_size=BATCH, progress=False)
    same_bits(nnx.state(module, nnx.Param), result.params)
    module.eval()
    np.testing.assert_allclose(result.predict(X, progress=False), module(X), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_result_predicts_evaluates_saves_and_prints_its_report(tmp_path):
    result = trained(CASES["a mixture of experts with a balance loss"])
    assert repr(result) == result.report()
    assert "<pre>" in result._repr_html_()
    logits = result.predict(X, progress=False)
    np.testing.assert_allclose(logits, Experts().apply({"params": result.params}, X), rtol=1e-5, atol=1e-6)
    result.save(tmp_path / "model")
    for params in (result.params, tmp_path / "model"):
        same_bits(tpuflow.predict(Experts(), X, params=params, batch_size=BATCH, progress=False), logits)
    found = tpuflow.evaluate(Experts(), (X, Y), params=result.params, batch_size=BATCH, progress=False)
    assert found == result.evaluate((X, Y), progress=False)
    assert set(found) == {"accuracy", "avg_loss"}
    with pytest.raises(tpuflow.errors.CheckpointError, match="is there already"):
        result.save(tmp_path / "model")


def test_what_a_loss_measures_beside_is_kept_step_by_step_and_in_evaluations():
    case = CASES["contrastive pairs"]
    result = trained(case, eval_data=case.data)
    assert [len(epoch["metrics"]["agreement"]) for epoch in result.history] == [N // BATCH] * EPOCHS
    assert set(result.history[-1]["evaluations"][-1]) == {"step", "avg_loss", "agreement"}


def test_accumulation_to_a_nominal_batch_takes_as_many_steps_as_make_it():
    result = trained(CASES["a mixture of experts with a balance loss"], nominal_batch_size=30)
    assert result.settings["accumulate_steps"] == 4


@pytest.mark.parametrize(
    "optimizer", [optax.contrib.schedule_free_sgd(0.1), optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True)]
)
def test_optimizers_that_want_more_than_gradients_get_it(optimizer):
    case = Case(Dense, (X, Y), lambda: {"optimizer": optimizer}, rtol=1e-4)
    np.testing.assert_allclose(trained(case).losses, plain_losses(case), rtol=case.rtol)


@pytest.mark.slow
def test_models_of_functions_haiku_and_equinox_train_like_the_same_linen_module():
    import equinox
    import haiku

    linen = nn.Dense(4)
    start = linen.init(jax.random.key(0), X[:1])["params"]
    wanted = tpuflow.train(linen, (X, Y), params=start, batch_size=BATCH, progress=False).losses

    def function(params, x):
        return x @ params["kernel"] + params["bias"]

    found = [tpuflow.train(function, (X, Y), params=start, batch_size=BATCH, progress=False).losses]
    transformed = haiku.transform(lambda x: haiku.Linear(4)(x))
    named = {"linear": {"w": start["kernel"], "b": start["bias"]}}
    found.append(tpuflow.train(transformed, (X, Y), params=named, batch_size=BATCH, progress=False).losses)
    layer = equinox.nn.Linear(12, 4, key=jax.random.key(0))
    layer = equinox.tree_at(lambda m: (m.weight, m.bias), layer, (start["kernel"].T, start["bias"]))
    found.append(tpuflow.train(layer, (X, Y), batch_size=BATCH, progress=False).losses)
    for losses in found:
        np.testing.assert_allclose(losses, wanted, rtol=1e-5)


def test_a_misspelled_option_is_named_with_the_nearest():
    with pytest.raises(tpuflow.errors.ConfigError, match=r"unknown train\(\) option 'epoch'.*epochs"):
        tpuflow.train(Dense(), (X, Y), epoch=3)  # type: ignore[call-arg]


def test_a_step_of_ones_own_refuses_options_that_it_would_not_obey():
    for option in ({"policy": "mixed"}, {"inputs": 0}, {"loss_scale": 8.0}, {"frozen": ("a",)}, {"optimizer": optax.sgd(0.1)}):
        with pytest.raises(tpuflow.errors.ConfigError, match=next(iter(option))):
            tpuflow.train(gan, (X, X), state=players(), batch_size=BATCH, progress=False, **option)


def test_a_collection_that_a_model_does_not_sow_is_empty():
    def loss_fn(apply, params, batch, rngs):
        outputs, sown = apply(params, batch, mutable=["losses"])
        assert sown == {"losses": {}}
        return jnp.mean(outputs**2)

    for model, params in ((nn.Dense(3), None), (lambda p, x: x @ p, np.ones((12, 2), np.float32))):
        assert tpuflow.train(model, X, loss_fn=loss_fn, params=params, batch_size=BATCH, progress=False).steps == N // BATCH


def test_an_nnx_module_that_is_only_looked_at_stays_as_it_is():
    module = Noisy()
    module.eval()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module, (nnx.Param, nnx.BatchStat))))
    tpuflow.predict(module, X, batch_size=BATCH, progress=False)
    tpuflow.training_step(module, (X, Y))
    assert module.dropout.deterministic
    assert module.norm.use_running_average
    same_bits(nnx.to_pure_dict(nnx.state(module, (nnx.Param, nnx.BatchStat))), before)


def test_an_average_that_is_not_evaluated_is_not_saved_either(tmp_path):
    result = tpuflow.train(Dense(), (X, Y), ema=tpuflow.EMA(0.5, evaluate=False), batch_size=BATCH, progress=False)
    result.save(tmp_path / "model")
    read = tpuflow.load_params(tmp_path / "model", like={"params": result.params})["params"]
    same_bits(read, result.params)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(*map(jax.tree.leaves, (result.ema, result.params)), strict=True))


def test_a_batch_in_a_list_is_a_pair_wherever_data_are_taken():
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, Y)]
    assert tpuflow.estimate_training(Dense(), shapes).step_seconds == tpuflow.estimate_training(Dense(), tuple(shapes)).step_seconds
    losses = [tpuflow.train(Dense(), data, batch_size=BATCH, progress=False).losses for data in ([X, Y], (X, Y), [[X[:BATCH], Y[:BATCH]]])]
    assert losses[0] == losses[1]
    assert losses[2] == losses[0][:1]
