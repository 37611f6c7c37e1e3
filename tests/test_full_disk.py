"""A checkpoint that cannot be written ends no training: it goes on to the same bits, says so, cleans up and tries at the next save."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import warnings
from contextlib import contextmanager, nullcontext

import optax
import pytest

import tpuflow
from tests.test_training import blobs, fit, same_bits
from tpuflow.errors import CheckpointError, CheckpointWriteError
from tpuflow.training.checkpoints import files as checkpoints

FULL = os.strerror(errno.ENOSPC)


class Full(tpuflow.ModelCheckpoint):
    """Finds no room after some of the steps: `fault` is a context in which writing fails."""

    def __init__(self, directory, steps, fault, **options):
        super().__init__(directory, **options)
        self._steps, self._fault = steps, fault

    def on_checkpoint(self, run):
        with self._fault() if run.steps in self._steps else nullcontext():
            super().on_checkpoint(run)


@contextmanager
def file_size_limit(most_bytes):
    """The kernel's own refusal, which Orbax and TensorStore meet as well: no file may become larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def planted(owner, name, error):
    """A function that fails with an error."""

    def fail(*_, **__):
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        yield


def no_space():
    return OSError(errno.ENOSPC, FULL)


TENSORSTORE = ValueError(
    f'RESOURCE_EXHAUSTED: Error writing "params.Dense_0.kernel/0.0" in OCDBT database at "/x/": {FULL} [os_error_code=\'28\']\nmore'
)
FAULTS = {
    # name: (context in which nothing can be written, the reason that is given)
    **{f"files of {n} bytes": (lambda n=n: file_size_limit(n), os.strerror(errno.EFBIG)) for n in (0, 90, 400, 900)},
    "folder": (lambda: planted(checkpoints.tempfile, "mkdtemp", no_space()), FULL),
    "arrays": (lambda: planted(checkpoints, "_write_state", TENSORSTORE), FULL),
    "sums": (lambda: planted(checkpoints, "write_sums", no_space()), FULL),
    "flush": (lambda: planted(checkpoints.os, "fsync", OSError(errno.EIO, os.strerror(errno.EIO))), os.strerror(errno.EIO)),
    "rename": (lambda: planted(checkpoints.os, "rename", OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))), os.strerror(errno.EDQUOT)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_training_goes_on_says_so_and_saves_again(tmp_path, name):
    fault, reason = FAULTS[name]
    saver = Full(tmp_path, {4, 6}, fault, every_steps=2, keep=None)
    with pytest.warns(RuntimeWarning) as said:
        result = fit(data=blobs(16 * 10), epochs=1, callbacks=[saver])
    assert same_bits(result.params, fit(data=blobs(16 * 10), epochs=1).params)
    assert [step for step in (4, 6) if any(f"in {step} steps is not saved" in str(w.message) for w in said)] == [4, 6] and len(said) == 2
    for warning in said:
        assert f"cannot be written: {reason}. The training goes on, and the next save tries again: make room there" in str(warning.message)
        assert str(warning.message).endswith("the newest checkpoint there is step_00000002.") and "\n" not in str(warning.message)
    assert sorted(os.listdir(tmp_path)) == [f"step_{step:08d}" for step in (2, 8, 10)]
    assert all(checkpoints.is_good(checkpoints.folder(tmp_path, step)) for step in (2, 8, 10)) and saver.last == tmp_path / "step_00000010"


def test_the_end_that_cannot_be_saved_is_said_and_goes_on_from_the_one_before(tmp_path):
    options = {"data": blobs(16 * 5), "epochs": 1}
    with pytest.warns(RuntimeWarning, match="in 5 steps is not saved.*The training has ended: save the params.*newest .* is step_00000004"):
        ended = fit(callbacks=[Full(tmp_path, {5}, lambda: file_size_limit(0), every_steps=2)], **options)
    assert ended.steps == 5
    with warnings.catch_warnings(action="error"):
        again = fit(callbacks=[tpuflow.ModelCheckpoint(tmp_path, every_steps=2)], resume=tmp_path, **options)
    assert again.resumed_at == 4 and same_bits(again.params, ended.params)


def test_a_disk_that_is_full_from_the_beginning_costs_no_step(tmp_path):
    with pytest.warns(RuntimeWarning, match="there is no checkpoint yet") as said:
        result = fit(epochs=1, callbacks=[Full(tmp_path, {1, 2, 3}, lambda: file_size_limit(0), every_steps=1)])
    assert result.steps == 3 and len(said) == 4 and os.listdir(tmp_path) == [], "after each step, and at the end"
    with file_size_limit(0), pytest.raises(CheckpointWriteError, match="cannot be written: File too large.*make room"):
        fit(epochs=1, callbacks=[tpuflow.ModelCheckpoint(tmp_path)])


def test_the_best_that_could_not_be_saved_does_not_keep_a_lesser_one_from_being_the_best_there_is(tmp_path):
    """Losses of the epochs fall; the second, which cannot be saved, is no longer what the third has to beat."""
    saver = Full(tmp_path, {6}, lambda: file_size_limit(0), best="loss", keep=1)
    steps = {"data": blobs(48), "epochs": 3, "optimizer": optax.sgd(0.01)}
    with pytest.warns(RuntimeWarning, match="in 6 steps is not saved"):
        result = fit(callbacks=[saver], **steps)
    losses = [sum(epoch["losses"]) for epoch in result.history]
    assert losses == sorted(losses, reverse=True)
    assert os.readlink(tmp_path / "best") == "step_00000009"

    class Worse(tpuflow.Callback):
        """The third epoch's losses lie between those of the first and the second."""

        def on_sink_end(self, run):
            if run.steps == 9:
                run.history[-1]["losses"] = [(a + b) / 2 for a, b in zip(*(run.history[i]["losses"] for i in (0, 1)), strict=True)]

    directory = tmp_path / "other"
    saver = Full(directory, {6}, lambda: file_size_limit(0), best="loss", keep=1)
    with pytest.warns(RuntimeWarning, match="in 6 steps is not saved"):
        fit(callbacks=[Worse(), saver], **steps)
    assert os.readlink(directory / "best") == "step_00000009", "better than the first, which is what there is"


@pytest.mark.parametrize("what", ["symlink", "replace"])
def test_a_link_or_an_old_checkpoint_that_cannot_be_changed_ends_no_training(tmp_path, what):
    saver = Full(tmp_path, {6}, lambda: planted(checkpoints.os, what, no_space()), every_epochs=1, best="loss", keep=1)
    with pytest.warns(RuntimeWarning, match=f"in 6 steps is not saved: .* cannot be written: {FULL}"):
        fit(epochs=3, optimizer=optax.sgd(0.01), callbacks=[saver])
    assert os.readlink(tmp_path / "best") == "step_00000009" and sorted(os.listdir(tmp_path)) == ["best", "step_00000009"]


def test_a_directory_that_is_removed_meanwhile_is_made_again(tmp_path):
    class Remove(tpuflow.Callback):
        def on_sink_end(self, run):
            if run.steps == 3:
                shutil.rmtree(tmp_path / "run")

    saver = tpuflow.ModelCheckpoint(tmp_path / "run", every_steps=1)
    with warnings.catch_warnings(action="error"):
        fit(epochs=2, callbacks=[Remove(), saver])
    assert checkpoints.saved_steps(tmp_path / "run") == [3, 4, 5, 6]


def test_a_state_that_json_cannot_hold_is_still_an_error(tmp_path):
    """It is no full disk: it would never be saved."""

    class Odd(tpuflow.Callback):
        def state_dict(self):
            return {"x": object()}

    with pytest.raises(CheckpointError, match="state of the data, or of a callback, cannot be saved"):
        fit(callbacks=[tpuflow.ModelCheckpoint(tmp_path), Odd()])


def test_ctrl_c_in_a_callback_of_a_step_saves_all_that_was_trained(tmp_path):
    class Press(tpuflow.Callback):
        def on_step_end(self, run):
            if run.steps == 2:
                raise KeyboardInterrupt

    options = {"data": blobs(100), "epochs": 2, "resume": tmp_path}
    first = fit(callbacks=[Press(), tpuflow.ModelCheckpoint(tmp_path)], **options)
    assert first.interrupted and first.steps == 7 and checkpoints.saved_steps(tmp_path) == [7]
    resumed = fit(callbacks=[tpuflow.ModelCheckpoint(tmp_path)], **options)
    assert resumed.resumed_at == 7 and same_bits(resumed.params, fit(data=blobs(100), epochs=2).params)
