"""Hooks, evaluation in the middle of sinks, TensorBoard, plots, and weights to start from."""

from __future__ import annotations

import importlib
import shutil

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import tpuflow
from tests.test_training import Net, blobs, fit, same_bits
from tpuflow.errors import ConfigError, WeightsError
from tpuflow.training.checkpoints import files as checkpoints

HOOKS = [name for name in vars(tpuflow.Callback) if name.startswith("on_")]


class Recorder(tpuflow.Callback):
    """Writes down every hook with the number of steps done."""

    def __init__(self):
        self.events = []
        for name in HOOKS:
            setattr(self, name, lambda run, name=name: self.events.append((name.removeprefix("on_"), run.steps)))


class Normed(nn.Module):
    """A network with batch statistics."""

    classes: int = 3

    @nn.compact
    def __call__(self, x, *, train: bool):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8, name="body")(x))
        return nn.Dense(self.classes, name="head")(nn.relu(x))


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_every_hook_comes_in_the_documented_order():
    recorder = Recorder()
    recorder.every_steps = 2
    fit(epochs=1, callbacks=[recorder], eval_data=blobs())
    assert recorder.events == [
        ("train_begin", 0),
        ("epoch_begin", 0),
        ("sink_begin", 0),
        *(("step_begin", 1), ("step_end", 1), ("step_begin", 2), ("step_end", 2)),
        ("sink_end", 2),
        ("checkpoint", 2),
        ("sink_begin", 2),
        *(("step_begin", 3), ("step_end", 3)),
        ("sink_end", 3),
        *(("eval_begin", 3), ("eval_end", 3)),
        ("epoch_end", 3),
        ("checkpoint", 3),
        ("train_end", 3),
        ("checkpoint", 3),
    ]
    assert {f"on_{name}" for name, _ in recorder.events} == set(HOOKS)


def test_an_error_in_a_callback_names_callback_and_hook():
    class Faulty(tpuflow.Callback):
        def on_step_end(self, run):
            if run.step == 4:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fit(epochs=2, callbacks=[Faulty()])
    assert caught.value.__notes__ == ["in Faulty.on_step_end, epoch 2, after 5 steps"]


@pytest.mark.parametrize("wrong, words", [(tpuflow.LossMonitor, "the class LossMonitor; pass an instance"), (print, "got <built-in")])
def test_what_is_no_callback_is_refused(wrong, words):
    with pytest.raises(ConfigError, match=f"callbacks: expected instances of tpuflow.Callback.*{words}"):
        fit(callbacks=[wrong])


# --- evaluation in the middle -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink_size, epochs", [(-1, 3), (9, 1)])
def test_evaluations_inside_a_sink_split_it_and_change_no_value(sink_size, epochs):
    whole = fit(epochs=3)
    result = fit(epochs=epochs, sink_size=sink_size, eval_data=blobs(), eval_steps=2)
    assert same_bits(result.params, whole.params) and result.losses == whole.losses
    evaluations = [evaluation for epoch in result.history for evaluation in epoch["evaluations"]]
    assert [evaluation["step"] for evaluation in evaluations] == [2, 4, 6, 8]
    assert result.eval_round_trips == 4 and result.round_trips == (6 if sink_size < 0 else 5)
    assert evaluations[1] == {"step": 4, **fit(data=first_batches(4), eval_data=blobs()).history[-1]["evaluations"][-1]}


def first_batches(steps):
    """The first steps of two epochs of `blobs()`, as a list of batches."""
    x, y = blobs()
    return [(x[i : i + 16], y[i : i + 16]) for i in (0, 16, 32, 0, 16, 32)][:steps]


def test_epochs_can_be_evaluated_now_and_then():
    result = fit(epochs=5, eval_data=blobs(), eval_epochs=2)
    assert [len(epoch["evaluations"]) for epoch in result.history] == [0, 1, 0, 1, 0]
    assert ["accuracy" in epoch for epoch in result.history] == [False, True, False, True, False]


def test_no_step_is_evaluated_twice():
    result = fit(epochs=2, eval_data=blobs(), eval_epochs=1, eval_steps=3)
    assert [[e["step"] for e in epoch["evaluations"]] for epoch in result.history] == [[3], [6]]


@pytest.mark.parametrize("options", [{"eval_steps": 2}, {"eval_epochs": 1}])
def test_evaluation_without_data_is_refused(options):
    with pytest.raises(ConfigError, match="there is no eval_data"):
        fit(**options)


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def events(directory):
    """(step -> value) of every tag in the event files."""
    from tensorboardX.event_file_writer import EventFileWriter  # noqa: F401  (the package is there)
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for file in sorted(directory.iterdir()):
        content, place = file.read_bytes(), 0
        while place < len(content):
            length = int.from_bytes(content[place : place + 8], "little")
            event = Event.FromString(content[place + 12 : place + 12 + length])
            place += 12 + length + 4
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_tensorboard_sees_every_figure(tmp_path):
    schedule = optax.linear_schedule(0.1, 0.0, 6)
    writer = tpuflow.SummaryWriter(tmp_path, learning_rate=schedule)
    result = fit(epochs=2, policy="mixed", optimizer=optax.sgd(schedule), eval_data=blobs(), callbacks=[writer])
    found = events(tmp_path)
    assert list(found["train/loss"].values()) == pytest.approx(result.losses)
    assert list(found["train/loss"]) == [1, 2, 3, 4, 5, 6]
    assert found["train/loss_scale"][2] == 32768.0 and found["train/skipped"][1] == 1.0
    assert found["train/learning_rate"][3] == pytest.approx(float(schedule(2)))
    assert found["eval/accuracy"] == {3: pytest.approx(result.history[0]["accuracy"]), 6: pytest.approx(result.history[1]["accuracy"])}
    assert min(found["time/step_ms"].values()) > 0


def test_a_learning_rate_in_the_optimizer_is_found(tmp_path):
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
    fit(optimizer=optimizer, callbacks=[tpuflow.SummaryWriter(tmp_path, every=2)])
    found = events(tmp_path)
    assert found["train/learning_rate"] == {3: 0.25}
    assert list(found["train/loss"]) == [1, 3]


@pytest.mark.parametrize(
    "module, use, words",
    [
        ("tensorboardX", lambda: tpuflow.SummaryWriter("runs"), r"SummaryWriter needs .*tpuflow\[tensorboard\]"),
        ("matplotlib.figure", lambda: importlib.import_module("tpuflow.training.plotting").plot_history([], "", ""), r"tpuflow\[plot\]"),
    ],
)
def test_a_missing_extra_is_named(monkeypatch, module, use, words):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ConfigError, match=words):
        use()


# --- plots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix, magic", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_curves_are_drawn(tmp_path, suffix, magic):
    result = fit(epochs=2, policy="mixed", eval_data=blobs())
    path = tmp_path / f"curves.{suffix}"
    result.plot(path)
    assert path.read_bytes().startswith(magic) and path.stat().st_size > 5000
    if suffix == "svg":
        text = path.read_text()
        assert all(f"<!-- {name} -->" in text for name in ("loss", "accuracy (%)", "avg_loss", "loss scale", "skipped step", "steps"))


def test_a_plot_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(ConfigError, match="plot: cannot write .*curves.nothing"):
        fit().plot(tmp_path / "curves.nothing")


# --- weights to start from --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint directory of a network with batch statistics, and its result."""
    directory = tmp_path_factory.mktemp("run")
    return directory, fit(Normed(), epochs=2, eval_data=blobs(), callbacks=[tpuflow.ModelCheckpoint(directory, best="accuracy")])


@pytest.mark.slow
def test_a_training_starts_from_a_checkpoint_of_another(trained, tmp_path):
    directory, before = trained
    for path in (directory, str(directory), before.variables):
        again = fit(Normed(), params=path, policy="mixed", optimizer=optax.sgd(0.0))
        assert again.resumed_at is None and same_bits(again.params, before.params)
    shutil.copytree(checkpoints.folder(directory, 6) / "state", tmp_path / "plain")
    assert same_bits(tpuflow.load_params(tmp_path / "plain", like=before.params), before.params)
    with pytest.raises(WeightsError, match="carried/batch_stats/.* has no place in the model"):
        tpuflow.load_params(tmp_path / "plain", like={"params": before.params})
    best = checkpoints.read(directory / "best").arrays["params"]
    assert same_bits(tpuflow.load_params(directory / "best", like=before.params), best)


def test_batch_statistics_come_along(trained):
    directory, before = trained
    variables = Normed().init(jax.random.key(5), blobs()[0], train=False)
    loaded = tpuflow.load_params(directory, like=variables)
    assert same_bits(loaded["batch_stats"], before.carried["batch_stats"])
    first = fit(Normed(), params=directory, optimizer=optax.sgd(0.0), eval_data=blobs(), data=[tuple(a[:16] for a in blobs())])
    # One step of batch statistics with momentum 0.99: still near those that were loaded, far from new ones.
    loaded_mean = before.carried["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(first.carried["batch_stats"]["BatchNorm_0"]["mean"], loaded_mean, atol=0.1)
    assert np.abs(loaded_mean).max() > 0.1


def test_a_new_last_layer_is_an_error_that_names_it_or_keeps_its_own(trained):
    directory, before = trained
    with pytest.raises(WeightsError, match=r"(?s)params/head/kernel is \[8, 3\] in the file, \[8, 5\] in the model.*skip_mismatched"):
        fit(Normed(5), params=directory)
    variables = Normed(5).init(jax.random.key(0), blobs()[0], train=False)
    with pytest.warns(RuntimeWarning, match="keeps its own arrays: params/head/bias"):
        loaded = tpuflow.load_params(directory, like=variables, skip_mismatched=True)
    assert same_bits(loaded["params"]["head"], variables["params"]["head"])
    assert same_bits(loaded["params"]["body"], before.params["body"])
    assert np.isfinite(fit(Normed(5), params=loaded).losses).all()
    with pytest.raises(WeightsError, match="head/bias.*`like` only its shape"):
        tpuflow.load_params(directory, like=jax.eval_shape(lambda: variables), skip_mismatched=True)


def test_a_pytorch_file_can_be_started_from(tmp_path):
    params = fit().params
    arrays = {f"{layer}.{'weight' if name == 'kernel' else name}": np.asarray(a).T for layer, p in params.items() for name, a in p.items()}
    np.savez(tmp_path / "weights.npz", **arrays)
    assert same_bits(fit(params=tmp_path / "weights.npz", optimizer=optax.sgd(0.0)).params, params)
    arrays["Dense_1.weight"] = np.zeros((9, 16), np.float32)
    np.savez(tmp_path / "other.npz", **arrays)
    with pytest.raises(WeightsError, match=r"Dense_1.weight \(9, 16\) becomes \(16, 9\), but .*Dense_1/kernel is \(16, 3\)"):
        fit(params=tmp_path / "other.npz")
    with pytest.warns(RuntimeWarning, match="not taken from the state dict"):
        loaded = tpuflow.load_params(tmp_path / "other.npz", like=params, skip_mismatched=True)
    assert same_bits(loaded, params)


@pytest.mark.parametrize("name", ["nothing", "nothing.npz"])
def test_weights_that_are_not_there_are_an_error(name, tmp_path):
    with pytest.raises(WeightsError, match="nothing"):
        fit(Net(), params=tmp_path / name)
