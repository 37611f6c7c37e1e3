"""Checkpoints: a training that was stopped anywhere goes on bit for bit; damage and other trainings are refused."""

from __future__ import annotations

import json
import os
import shutil
import warnings

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

import tpuflow
from tests import killed_training
from tests.test_training import Net, blobs, fit, same_bits
from tpuflow.data.epochs import EpochIterator
from tpuflow.data.feeding import make_feed
from tpuflow.data.positions import Position
from tpuflow.device.timing import calibration
from tpuflow.errors import CheckpointError, ConfigError, DataError
from tpuflow.training.checkpoints import files as checkpoints
from train.pipeline import Batches, Loader


class Stop(tpuflow.Callback):
    """Fails in the middle of a training, as a power cut would."""

    def __init__(self, after):
        self.after = after

    def on_step_end(self, run):
        if run.steps == self.after:
            raise RuntimeError("power cut")


class Dropped(nn.Module):
    """Draws random numbers and carries batch statistics."""

    @nn.compact
    def __call__(self, x, *, train: bool):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        return nn.Dense(3)(nn.Dropout(0.3, deterministic=not train)(nn.relu(x)))


def stop_and_resume(directory, after=14, every=4, model=None, make_data=None, **options):
    """A training that stops after so many steps and is called again, as it was called before."""
    options = {"epochs": 3, "optimizer": optax.adam(0.01), **options}
    for callbacks in ([Stop(after)], []):
        saver = tpuflow.ModelCheckpoint(directory, every_steps=every, keep=3)
        data = blobs(100) if make_data is None else make_data()
        call = {"model": model, "data": data, "callbacks": [saver, *callbacks], "resume": directory, **options}
        if callbacks:
            with pytest.raises(RuntimeError, match="power cut"):
                fit(**call)
    return fit(**call)


def same_outcome(a, b):
    """Whether two trainings ended in the same bits, with the same figures."""
    return same_bits((a.params, a.carried, a.opt_state), (b.params, b.carried, b.opt_state)) and a.history == b.history


# --- bit for bit ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sink_size, epochs", [(-1, 3), (0, 3), (5, 4)])
def test_a_resumed_training_ends_in_the_same_bits_whatever_the_sink(tmp_path, sink_size, epochs):
    options = {"sink_size": sink_size, "epochs": epochs, "policy": "mixed", "shuffle": True, "eval_data": blobs()}
    resumed = stop_and_resume(tmp_path / "run", **options)
    assert resumed.resumed_at == 12
    assert same_outcome(resumed, fit(data=blobs(100), optimizer=optax.adam(0.01), **options))


@pytest.mark.slow
def test_a_training_is_resumed_without_a_warning_after_a_new_fit(tmp_path, monkeypatch):
    options = {"data": blobs(100), "chip": "ascend910", "epochs": 2, "optimizer": optax.adam(0.01), "resume": tmp_path / "run"}
    with pytest.raises(RuntimeError, match="power cut"):
        fit(callbacks=[tpuflow.ModelCheckpoint(tmp_path / "run", every_steps=4), Stop(6)], **options)
    monkeypatch.setattr(calibration, "FITS", {"ascend": {"kernel_seconds": 1e-3, "fit": "another fit"}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = fit(**options)
    assert resumed.resumed_at and "another fit" in resumed.report()


@pytest.mark.slow
def test_random_keys_batch_statistics_and_accumulated_gradients_are_resumed(tmp_path):
    def optimizer():
        return optax.MultiSteps(optax.adam(0.01), every_k_schedule=3)

    resumed = stop_and_resume(tmp_path / "run", model=Dropped(), optimizer=optimizer())
    assert resumed.resumed_at == 12
    assert same_outcome(resumed, fit(Dropped(), blobs(100), optimizer=optimizer(), epochs=3))


def make_loader():
    return Loader(Batches(*blobs(100), batch_size=16, shuffle=True, seed=3))


def make_grain():
    import grain

    x, y = blobs(100)
    data = grain.MapDataset.range(100).seed(1).shuffle().map(lambda i: (x[i], y[i])).batch(16).to_iter_dataset()
    return data


class Seekable:
    """Batches that differ from pass to pass and can be moved by their number alone."""

    def __init__(self):
        self.at, self.loader = 0, make_loader()

    def seek(self, batches):
        self.at = batches

    def __iter__(self):
        while True:
            yield self.loader.batches[self.at]
            self.at += 1
            if self.at % 7 == 0:
                return


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_data", [make_loader, make_grain, Seekable, lambda: list(make_loader())], ids=["loader", "grain", "seek", "list"]
)
def test_data_of_every_kind_go_on_where_they_were(tmp_path, make_data):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = stop_and_resume(tmp_path / "run", after=11, every=3, make_data=make_data)
    assert resumed.resumed_at == 9, "in the second pass"
    assert same_outcome(resumed, fit(data=make_data(), optimizer=optax.adam(0.01), epochs=3))


@pytest.mark.slow
def test_data_that_cannot_be_moved_are_drawn_again_and_this_is_said(tmp_path):
    def make_data():
        passes = iter([blobs(100, seed=0), blobs(70, seed=1), blobs(100, seed=2)])

        def batches():
            x, y = next(passes)
            return ((x[i : i + 16], y[i : i + 16]) for i in range(0, len(x), 16))

        return batches

    with pytest.warns(RuntimeWarning, match="first 9 batches are drawn again"):
        resumed = stop_and_resume(tmp_path / "run", after=11, every=3, make_data=make_data)
    assert same_outcome(resumed, fit(data=make_data(), optimizer=optax.adam(0.01), epochs=3))


def test_data_that_have_become_fewer_are_an_error():
    feed = make_feed([(np.zeros((4, 2), np.float32), np.zeros(4, np.int32))] * 3, 4)
    feed.first()
    with pytest.raises(DataError, match="stopped after batch 5 of its pass, but the data now end after 3"):
        next(EpochIterator(feed, Position(batches=5, steps=5)).chunks(1))


@pytest.mark.slow
def test_a_resumed_training_may_have_other_sinks_and_more_epochs(tmp_path):
    directory = tmp_path / "run"
    fit(data=blobs(100), epochs=1, callbacks=[tpuflow.ModelCheckpoint(directory)], resume=directory)
    longer = fit(data=blobs(100), epochs=5, sink_size=4, callbacks=[tpuflow.ModelCheckpoint(directory)], resume=directory)
    assert longer.resumed_at == 7 and longer.steps == 20
    whole = fit(data=blobs(100), epochs=5, sink_size=4)
    assert same_bits(whole.params, longer.params) and whole.losses == longer.losses


def test_a_finished_training_is_not_trained_again(tmp_path):
    directory = tmp_path / "run"
    first, again = (fit(epochs=2, callbacks=[tpuflow.ModelCheckpoint(directory)], resume=directory, eval_data=blobs()) for _ in range(2))
    assert again.resumed_at == first.steps == 6 and same_outcome(first, again)


def test_ctrl_c_saves_what_was_trained(tmp_path):
    class Press(tpuflow.Callback):
        def on_sink_end(self, run):
            if run.steps == 5:
                raise KeyboardInterrupt

    directory = tmp_path / "run"
    options = {"data": blobs(100), "sink_size": 0, "resume": directory}
    assert fit(callbacks=[Press(), tpuflow.ModelCheckpoint(directory)], **options).interrupted
    resumed = fit(callbacks=[tpuflow.ModelCheckpoint(directory)], **options)
    assert resumed.resumed_at == 5 and same_outcome(resumed, fit(data=blobs(100), sink_size=0))


def test_an_empty_directory_means_from_the_beginning_and_this_is_said(tmp_path, capsys):
    directory = tmp_path / "nothing"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # where this training saves its own, the first run finds nothing
        result = fit(resume=directory, callbacks=[tpuflow.ModelCheckpoint(directory)], progress=True)
    assert result.resumed_at is None and result.steps == 3
    assert "no checkpoint in" in capsys.readouterr().err


def test_a_directory_that_no_training_saves_in_is_warned_of_without_progress_too(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.warns(RuntimeWarning, match=r"resume: .*has no 'chekpoints'\. Did you mean 'checkpoints'\?"):
        fit(resume=tmp_path / "chekpoints", progress=False)
    with pytest.warns(RuntimeWarning, match="resume: .*holds no checkpoint"):
        fit(resume=tmp_path / "checkpoints", progress=False)


# --- which checkpoints are kept ---------------------------------------------------------------------------------------


def test_the_newest_are_kept_and_the_best_beside_them(tmp_path):
    directory = tmp_path / "run"
    saver = tpuflow.ModelCheckpoint(directory, every_epochs=1, keep=2, best="avg_loss")
    result = fit(epochs=5, optimizer=optax.sgd(3.0), callbacks=[saver], eval_data=blobs())
    losses = [epoch["avg_loss"] for epoch in result.history]
    best = 3 * (1 + int(np.argmin(losses)))
    assert checkpoints.saved_steps(directory) == sorted({best, 12, 15})
    assert os.readlink(directory / "best") == f"step_{best:08d}"
    assert saver.last == directory / "step_00000015"
    read = checkpoints.read(directory / "best")
    assert read.progress["callbacks"]["ModelCheckpoint"]["best"] == min(losses)


def test_a_training_killed_between_the_best_checkpoint_and_the_link_to_it_sets_the_link_when_it_goes_on(tmp_path):
    directory = tmp_path / "run"

    def saver():
        return tpuflow.ModelCheckpoint(directory, best="avg_loss", mode="max")  # the first, of weights that are not yet trained

    fit(epochs=1, callbacks=[saver()], eval_data=blobs())
    (directory / "best").unlink()
    result = fit(epochs=3, callbacks=[saver()], eval_data=blobs(), resume=directory)
    losses = [epoch["avg_loss"] for epoch in result.history]
    assert losses[0] == max(losses) and os.readlink(directory / "best") == "step_00000003"


def test_early_stopping_goes_on_counting_after_a_resumption(tmp_path):
    def stopping():
        return tpuflow.EarlyStopping("avg_loss", patience=3, min_delta=100.0)

    options = {"epochs": 9, "eval_data": blobs(), "eval_steps": 2, "data": blobs(100)}
    whole = fit(callbacks=[stopping()], **options)
    assert whole.steps == 8, "the first evaluation, after step 2, is the best; three more follow"
    directory = tmp_path / "run"
    with pytest.raises(RuntimeError, match="power cut"):
        fit(callbacks=[tpuflow.ModelCheckpoint(directory, every_steps=5), stopping(), Stop(6)], **options)
    resumed = fit(callbacks=[tpuflow.ModelCheckpoint(directory, every_steps=5), stopping()], resume=directory, **options)
    assert resumed.resumed_at == 5 and same_outcome(resumed, whole)
    again = fit(callbacks=[tpuflow.ModelCheckpoint(directory, every_steps=5), stopping()], resume=directory, **options)
    assert again.steps == 8, "a training that was stopped stays stopped"


def test_a_directory_of_another_training_is_not_written_to(tmp_path):
    fit(callbacks=[tpuflow.ModelCheckpoint(tmp_path)])
    with pytest.raises(CheckpointError, match="holds step_00000003 of another training.*resume="):
        fit(callbacks=[tpuflow.ModelCheckpoint(tmp_path)])


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """A directory with the checkpoints after 3 and after 6 steps."""
    directory = tmp_path_factory.mktemp("run")
    fit(epochs=2, callbacks=[tpuflow.ModelCheckpoint(directory)])
    return directory


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flip, os.unlink], ids=["cut short", "one bit flipped", "missing"])
def test_damage_to_any_file_is_noticed(two_checkpoints, tmp_path, damage):
    """Every file of a checkpoint, one after the other: the checkpoint is refused, with a warning that names the file, and the one
    before it is used."""
    names = [file.relative_to(two_checkpoints) for file in (two_checkpoints / "step_00000006").rglob("*") if file.is_file()]
    assert len(names) >= 5
    for name in names:
        shutil.copytree(two_checkpoints, tmp_path / "copy", symlinks=True)
        damage(tmp_path / "copy" / name)
        with pytest.warns(RuntimeWarning, match=rf"(?s){name.name}.*It is refused; step_00000003 is used instead"):
            assert checkpoints.read_newest(tmp_path / "copy").progress["steps"] == 3
        shutil.rmtree(tmp_path / "copy")


def test_without_a_good_checkpoint_there_is_an_error_and_no_new_beginning(two_checkpoints, tmp_path):
    shutil.copytree(two_checkpoints, tmp_path / "run")
    for step in (3, 6):
        flip(tmp_path / "run" / f"step_{step:08d}" / "training.json")
    with pytest.raises(CheckpointError, match="(?s)no checkpoint is good.*step_00000006.*step_00000003"):
        fit(resume=tmp_path / "run")
    with pytest.raises(CheckpointError, match="training.json is damaged"):
        fit(resume=tmp_path / "run" / "step_00000006")


def test_a_training_that_falls_back_replaces_the_damaged_checkpoint(two_checkpoints, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(two_checkpoints, directory)
    flip(directory / "step_00000006" / "training.json")
    with pytest.warns(RuntimeWarning, match="refused"):
        result = fit(epochs=2, callbacks=[tpuflow.ModelCheckpoint(directory)], resume=directory)
    assert result.resumed_at == 3
    assert same_bits(checkpoints.read(directory / "step_00000006").arrays, checkpoints.read(two_checkpoints / "step_00000006").arrays)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model": Net(17)}, "params/Dense_0/kernel was float32.7, 16., here float32.7, 17."),
        ({"optimizer": optax.adam(0.1)}, "opt_state/.*is not in the checkpoint"),
        ({"policy": "fp16"}, "policy was 'fp32', here 'fp16'"),
        ({"batch_size": 8}, "batch_size was 16, here 8"),
        ({"data": blobs(seed=1)}, "data was"),
        ({"shuffle": True}, "shuffle was False, here True"),
        ({"loss": optax.softmax_cross_entropy_with_integer_labels}, "loss was 'softmax_cross_entropy'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_training_cannot_be_resumed(two_checkpoints, change, words):
    with pytest.raises(CheckpointError, match=f"(?s)cannot resume from .*step_00000006.*{words}"):
        fit(epochs=3, resume=two_checkpoints, **change)


def test_another_learning_rate_is_warned_of(two_checkpoints):
    with pytest.warns(RuntimeWarning, match="learning rate.*not bit for bit"):
        assert fit(epochs=3, optimizer=optax.sgd(0.01), resume=two_checkpoints).resumed_at == 6


def test_a_file_is_no_directory_of_checkpoints(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        fit(resume=tmp_path / "run")
    with pytest.raises(CheckpointError, match="cannot be written"):
        fit(callbacks=[tpuflow.ModelCheckpoint(tmp_path / "run")])


@pytest.mark.parametrize("options", [{"every_steps": 0}, {"every_epochs": 1.5}, {"keep": 0}, {"best": "accuracy", "mode": "most"}])
def test_senseless_options_are_refused(tmp_path, options):
    with pytest.raises(ConfigError, match="ModelCheckpoint"):
        tpuflow.ModelCheckpoint(tmp_path, **options)


def test_a_watched_metric_must_exist(tmp_path):
    with pytest.raises(ConfigError, match="'accuracy' comes from evaluations: give eval_data"):
        fit(callbacks=[tpuflow.EarlyStopping("accuracy")])
    with pytest.raises(ConfigError, match="no metric is called 'acuracy'; there are: accuracy, avg_loss, loss"):
        fit(callbacks=[tpuflow.EarlyStopping("acuracy")], eval_data=blobs())


# --- what is on the disk ----------------------------------------------------------------------------------------------


def test_other_tools_can_read_and_check_a_checkpoint(two_checkpoints):
    import hashlib

    import orbax.checkpoint as ocp

    path = two_checkpoints / "step_00000006"
    sums = dict(line.split("  ")[::-1] for line in (path / "SHA256SUMS").read_text().splitlines())
    assert sums["training.json"] == hashlib.sha256((path / "training.json").read_bytes()).hexdigest()
    arrays = ocp.StandardCheckpointer().restore(path / "state")
    assert same_bits(arrays["params"], fit(epochs=2).params)
    assert len(json.loads((path / "training.json").read_text())["history"]) == 2


def test_bits_of_every_type_survive(tmp_path):
    import ml_dtypes

    rng = np.random.default_rng(0)
    names = ["float32", "float16", "bfloat16", "uint32", "int8", "bool"]
    bits = {name: rng.integers(0, 256, 4096, np.uint8) for name in names}
    bits["bool"] &= 1
    arrays = {name: value.view(np.dtype(getattr(ml_dtypes, name, name))) for name, value in bits.items()}
    arrays |= {"minus": np.full(9, -0.0, np.float32), "scalar": np.array(7, np.int32), "zero": np.zeros((2, 3), np.float16)}
    checkpoints.save(tmp_path, 1, {"params": arrays}, {"steps": 1})
    read = checkpoints.read(tmp_path / "step_00000001").arrays["params"]
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in read.items()} == {
        name: (a.dtype, a.shape, a.tobytes()) for name, a in arrays.items()
    }


# --- SIGKILL ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_killed_twelve_times_ends_in_the_same_bits(tmp_path):
    kills = 12
    killed, locked, started = killed_training.kill_and_resume(tmp_path, kills, seed=kills)
    assert killed == locked == kills and started == kills + 1
    whole = killed_training.train(str(tmp_path / "whole"))
    with np.load(tmp_path / "final.npz") as found:
        assert same_bits(list(found.values()), jax.tree.leaves((whole.params, whole.opt_state)))
    left = [entry.name for entry in os.scandir(tmp_path / "run")]
    assert len(left) == 3 and all(name.startswith("step_") for name in left), "nothing half written stays behind, and no lock"
