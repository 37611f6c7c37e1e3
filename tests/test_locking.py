"""One training at a time writes checkpoints in a directory: a second is refused before it touches anything, and the dead hold nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings

import jax
import pytest

import tpuflow
from tests import killed_training
from tests.test_training import fit, same_bits
from tpuflow.errors import CheckpointError, CheckpointWriteError
from tpuflow.training.checkpoints import files as checkpoints
from tpuflow.training.checkpoints.locking import LOCK, Claims

pytestmark = pytest.mark.optimised

HOLD = """
import os, sys, time
from tpuflow.training.checkpoints.locking import Claims
claims = Claims()
claims.claim(sys.argv[1])
child = os.fork()
if child == 0:
    claims.__exit__()
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""


def tree(directory):
    """Everything in a directory, with its time of change."""
    return {path: path.lstat().st_mtime_ns for path in (directory, *directory.rglob("*"))}


# --- two trainings ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_process_is_refused_and_the_first_loses_nothing(tmp_path):
    """The first is in the middle of writing a checkpoint."""
    directory = tmp_path / "run"
    process, pipe = killed_training.start(killed_training.paused_child, str(directory), jax.config.jax_compilation_cache_dir, duplex=True)
    pid = pipe.recv()
    before = tree(directory)  # with what the first has half written
    assert any(path.name.startswith(".unfinished-") for path in before)
    words = rf"is being written by another training: process {pid} on host '{socket.gethostname()}', since '20.*another directory, or wait"
    with pytest.raises(CheckpointError, match=words):
        killed_training.train(str(directory))
    assert tree(directory) == before
    pipe.send("go on")
    assert pipe.recv() == "done"
    process.join()
    found = checkpoints.read_newest(directory)
    whole = killed_training.train(str(tmp_path / "whole"))
    assert found.progress["steps"] == killed_training.STEPS and same_bits(found.arrays["params"], whole.params)
    assert sorted(os.listdir(directory)) == sorted(os.listdir(tmp_path / "whole"))


def test_a_training_within_a_training_is_refused(tmp_path):
    class Again(tpuflow.Callback):
        def on_step_end(self, run):
            with pytest.raises(CheckpointError, match=rf"process {os.getpid()} \(this process\)"):
                fit(callbacks=[tpuflow.ModelCheckpoint(tmp_path)])

    fit(epochs=1, callbacks=[tpuflow.ModelCheckpoint(tmp_path), Again()])
    assert os.listdir(tmp_path) == ["step_00000003"], "and the lock is gone when the training is over"


def test_the_lock_is_given_back_however_the_training_ends(tmp_path):
    class Fail(tpuflow.Callback):
        def on_train_end(self, run):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fit(epochs=1, callbacks=[tpuflow.ModelCheckpoint(tmp_path), Fail()])
    assert LOCK not in os.listdir(tmp_path)
    Claims().claim(tmp_path)


def test_a_callback_of_the_users_own_that_saves_is_the_one_writer_too(tmp_path):
    class Mine(tpuflow.Callback):
        def on_checkpoint(self, run):
            run.save(tmp_path / "run")
            with pytest.raises(CheckpointWriteError, match="another training"), Claims() as others:
                others.claim(tmp_path / "run")

    fit(epochs=1, callbacks=[Mine()])
    assert os.listdir(tmp_path / "run") == ["step_00000003"]


# --- the lock ---------------------------------------------------------------------------------------------------------


def test_who_is_killed_holds_nothing_even_if_a_forked_child_lives_on(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True)
    child = int(holder.stdout.readline())
    try:
        time.sleep(0.1)  # for the child to give back what is not its own
        with pytest.raises(CheckpointWriteError, match=f"process {holder.pid} "), Claims() as claims:
            claims.claim(tmp_path)
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == holder.pid
        holder.kill()
        holder.wait()
        os.kill(child, 0)
        with Claims() as claims:
            claims.claim(tmp_path)
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    finally:
        os.kill(child, signal.SIGKILL)
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert os.listdir(tmp_path) == []


def test_of_many_who_ask_at_once_one_gets_it(tmp_path):
    """Threads that claim and give back as fast as they can, so that lock files are removed while others open them."""
    inside, most, taken = [], [], []

    def ask():
        own = 0
        while own < 25:
            try:
                with Claims() as claims:
                    claims.claim(tmp_path)
                    inside.append(1)
                    most.append(len(inside))
                    taken.append(1)
                    inside.pop()
                own += 1
            except CheckpointWriteError as error:
                assert "another training" in str(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and len(taken) == 100 and os.listdir(tmp_path) == []


def test_a_lock_file_removed_between_its_opening_and_its_locking_is_none(tmp_path, monkeypatch):
    flock, first, asked = fcntl.flock, Claims(), []

    def late(handle, how):
        asked.append(handle)
        if len(asked) == 1:
            first.__exit__()
        flock(handle, how)

    first.claim(tmp_path)
    monkeypatch.setattr(fcntl, "flock", late)
    with Claims() as second, Claims() as third:
        second.claim(tmp_path)
        assert len(asked) == 2 and os.listdir(tmp_path) == [LOCK]
        with pytest.raises(CheckpointWriteError, match="another training"):
            third.claim(tmp_path)


def test_what_a_killed_training_left_is_removed_by_the_next_one_only(tmp_path):
    (tmp_path / ".unfinished-a" / "state").mkdir(parents=True)
    (tmp_path / ".deleted-step_00000001").mkdir()
    (tmp_path / ".unfinished-link").symlink_to(tmp_path)
    (tmp_path / ".unfinished-file").write_text("")
    (tmp_path / "mine.txt").write_text("")
    (tmp_path / LOCK).write_text('{"pid": 1, "host": "gone", "since": "long ago"}')
    with Claims() as claims:
        claims.claim(tmp_path)
        claims.claim(tmp_path)
        assert sorted(os.listdir(tmp_path)) == [LOCK, "mine.txt"]


def test_a_file_system_without_locks_is_warned_of_and_nothing_there_is_removed(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    (tmp_path / ".unfinished-a").mkdir()
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(RuntimeWarning, match="has no locks .No locks available.*see to it"), Claims() as claims:
        claims.claim(tmp_path)
    assert os.listdir(tmp_path) == [".unfinished-a"]


def test_a_directory_that_was_removed_is_made_and_claimed_again(tmp_path):
    directory = tmp_path / "run"
    with Claims() as first, Claims() as second:
        first.claim(directory)
        os.rename(directory, tmp_path / "elsewhere")
        first.claim(directory)
        assert os.listdir(directory) == [LOCK]
        (directory / LOCK).unlink()
        second.claim(directory)
        with pytest.raises(CheckpointWriteError, match="another training"):
            first.claim(directory)
    assert os.listdir(directory) == []


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/dev/null"), lambda path: path.mkdir()], ids=["link", "directory"])
def test_something_else_in_the_lock_files_place_is_one_error(tmp_path, make):
    make(tmp_path / LOCK)
    with pytest.raises(CheckpointWriteError, match="cannot be written"), Claims() as claims:
        claims.claim(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"pid": "x"}', "[" * 900, "\xff"], ids=range(6))
def test_a_lock_file_that_says_nothing_hinders_nobody_from_being_refused(tmp_path, text):
    with Claims() as first, Claims() as second, warnings.catch_warnings(action="error"):
        first.claim(tmp_path)
        (tmp_path / LOCK).write_text(text, encoding="latin-1")
        with pytest.raises(CheckpointWriteError, match="another training: it has only just begun"):
            second.claim(tmp_path)
