"""Checkpoints that were damaged or forged raise CheckpointError, whatever is in them, and a training goes on from the one before."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import warnings
from dataclasses import fields

import numpy as np
import pytest

import tpuflow
from tests.mutating import flipped
from tests.test_training import fit, same_bits
from tpuflow.data.positions import Position
from tpuflow.errors import CheckpointError
from tpuflow.training import training_loop
from tpuflow.training.checkpoints import files as checkpoints
from tpuflow.training.checkpoints.progress_schema import EPOCH, LOOP_POSITION, POSITION, check_progress
from tpuflow.training.checkpoints.resuming import LoopPosition, new_epoch
from tpuflow.training.checkpoints.sums import SUMS, files, write_sums

GOOD, NEWEST = "step_00000003", "step_00000006"
MUTANTS = 250
"""Damaged and forged checkpoints: about 10 s."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with the checkpoints after 3 and after 6 steps, of a training with a callback that has a state."""
    directory = tmp_path_factory.mktemp("run")
    fit(epochs=2, callbacks=[tpuflow.ModelCheckpoint(directory, best="loss")])
    return directory


@pytest.fixture
def run(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def forge(path, content):
    """Another training.json, with hashes that are right."""
    (path / "training.json").write_bytes(content)
    write_sums(path)


def progress_of(path):
    return json.loads((path / "training.json").read_text())


def refused(run, words):
    """That the newest is refused with these words, and the one before it is read."""
    with pytest.warns(RuntimeWarning, match=f"(?s){words}.*It is refused; {GOOD} is used instead") as said:
        assert checkpoints.read_newest(run, check_progress).path.name == GOOD
    assert len(said) == 1
    with pytest.raises(CheckpointError):
        check_progress(checkpoints.read(run / NEWEST))


# --- the list of files ------------------------------------------------------------------------------------------------


def line(path, name):
    return f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}\n"


def every(path):
    return [line(path, name) for name in files(path) if name != SUMS]


LISTS = {
    "nothing": (lambda p: "", "is damaged"),
    "nothing but empty lines": (lambda p: "\n\n", "is damaged"),
    "the progress alone": (lambda p: line(p, "training.json"), "lists no state"),
    "no progress": (lambda p: "".join(every(p)[:-1]), "lists no training.json"),
    "not every file": (lambda p: "".join(every(p)[1:]), "is not listed in SHA256SUMS"),
    "a file twice": (lambda p: "".join([*every(p), every(p)[0]]), "is damaged"),
    "no end of the last line": (lambda p: "".join(every(p))[:-1], "is damaged"),
    "an absolute path": (lambda p: f"{'0' * 64}  /etc/passwd\n" + "".join(every(p)), "/etc/passwd, listed in SHA256SUMS, is missing"),
    "a path out of it": (lambda p: line(p, f"../{GOOD}/training.json") + "".join(every(p)), "is missing"),
    "itself by another path": (lambda p: line(p, "./training.json") + "".join(every(p)), "./training.json, listed .* is missing"),
    "a folder": (lambda p: f"{'0' * 64}  state\n" + "".join(every(p)), "state, listed in SHA256SUMS, is missing"),
    "bytes that are no text": (lambda p: b"\xff\n", "is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_a_list_that_does_not_list_each_file_once_is_refused(run, name):
    make, words = LISTS[name]
    content = make(run / NEWEST)
    (run / NEWEST / SUMS).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(run, words)


def link_to(inside):
    def change(path):
        os.rename(path / inside, path.parent / "moved")
        (path / inside).symlink_to(path.parent / "moved")

    return change


def pipe(path):
    (path / "training.json").unlink()
    os.mkfifo(path / "training.json")


def whole_link(path):
    os.rename(path, path.parent / "moved")
    path.symlink_to("moved")


THINGS = {
    "a linked file": (link_to("training.json"), "training.json is a link"),
    "a linked folder": (link_to("state"), "state is a link"),
    "a linked list": (link_to(SUMS), "SHA256SUMS is a link"),
    "a linked checkpoint": (whole_link, "is a link to 'moved'"),
    "a link more": (lambda path: (path / "more").symlink_to("/etc"), "more is a link"),
    "a pipe": (pipe, "training.json is a link, a pipe or a device"),
    "a file more": (lambda path: (path / "state" / "more").write_text(""), "state/more is not listed"),
    "a folder in a file's place": (lambda path: ((path / SUMS).unlink(), (path / SUMS).mkdir()), "SHA256SUMS is missing"),
}


@pytest.mark.parametrize("name", THINGS)
def test_nothing_but_files_of_its_own_is_read(run, name):
    change, words = THINGS[name]
    change(run / NEWEST)
    with pytest.warns(RuntimeWarning, match=f"(?s){words}.*It is refused; {GOOD} is used instead"):
        assert checkpoints.read_newest(run).path.name == GOOD


def test_a_link_to_a_checkpoint_is_followed_where_the_user_gives_it(run):
    assert checkpoints.read(run / "best").path == checkpoints.read_newest(run / "best").path == run / os.readlink(run / "best")


def test_a_training_replaces_a_link_in_a_checkpoints_place_and_not_what_it_names(run, tmp_path):
    whole_link(run / NEWEST)
    with pytest.warns(RuntimeWarning, match="is a link"):
        result = fit(epochs=2, callbacks=[tpuflow.ModelCheckpoint(run, best="loss")], resume=run)
    assert result.resumed_at == 3 and not (run / NEWEST).is_symlink() and checkpoints.is_good(run / "moved")


# --- training.json ----------------------------------------------------------------------------------------------------


CONTENTS = {
    "a list": (b"[]", "holds a list; expected an object"),
    "a string": (b'"x"', "holds a str"),
    "nothing": (b"", "is not JSON"),
    "deep nesting": (b"[" * 100_000 + b"]" * 100_000, "is not JSON as tpuflow.train writes it: maximum recursion depth"),
    "deep objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "is not JSON"),
    "bad UTF-8": (b'{"format": 2, "x": "\xff"}', "is not JSON"),
    "UTF-16": ('{"format": 2}'.encode("utf-16"), "is not JSON"),
    "a number too long": (b'{"format": ' + b"1" * 10_000 + b"}", "is not JSON"),
    "bytes that are none": (b'{"format": 2, "x": {"base64": 7}}', "is not JSON"),
    "another version": (b'{"format": 1}', "its format is 1, this version of tpuflow reads 2"),
    "a version that is none": (b'{"format": [1]}', r"its format is \[1\]"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_progress_that_is_no_object_of_ours_is_refused(run, name):
    content, words = CONTENTS[name]
    forge(run / NEWEST, content)
    refused(run, words)


def changes(progress):
    """(what is changed, the changed progress): every required field missing, or of another kind, and sums that contradict each other."""
    position = progress["place"]["position"]
    owners = {"": progress, "place": progress["place"], "place.position": position, "history.0": progress["history"][0]}
    for where, owner in owners.items():
        for name in list(owner):
            if (where, name) in {("", "format"), ("place.position", "source")} or (where == "history.0" and name not in EPOCH):
                continue
            for value in ("missing", "x", -2, 1.5, None, [[]], [None], {"a": 1}):
                fits_any = (name == "fingerprint" and value == {"a": 1}) or (name == "step_code" and value == "x")
                if fits_any:
                    continue
                kept = owner[name]
                if value == "missing":
                    del owner[name]
                else:
                    owner[name] = value
                yield f"{where}.{name} = {value!r}", copy.deepcopy(progress)
                owner[name] = kept
    for owner, name, value in ((position, "passes", 10**18), (position, "batches", 10**18), (position, "behind", 1), (position, "steps", 7),
                               (progress, "steps", 5), (progress["place"], "extra", 1), (position, "extra", 1)):  # fmt: skip
        kept = owner.get(name)
        owner[name] = value
        yield f"{name} = {value!r}", copy.deepcopy(progress)
        if kept is None:
            del owner[name]
        else:
            owner[name] = kept


def test_every_field_is_checked_before_anything_is_used(saved):
    progress = progress_of(saved / NEWEST)
    path = saved / NEWEST
    check_progress(checkpoints.Checkpoint(path, {}, progress))
    found = list(changes(progress))
    assert len(found) > 150
    for what, changed in found:
        with pytest.raises(CheckpointError, match="training.json is not what tpuflow.train writes"):
            check_progress(checkpoints.Checkpoint(path, {}, changed))
            pytest.fail(f"{what} was taken")


def test_the_form_names_the_fields_that_there_are():
    assert list(POSITION) == [field.name for field in fields(Position)] and list(LOOP_POSITION) == [
        field.name for field in fields(LoopPosition)
    ]
    assert set(EPOCH) == set(new_epoch(0))


def test_a_callbacks_state_that_it_cannot_take_up_is_named(run):
    progress = progress_of(run / NEWEST)
    progress["callbacks"]["ModelCheckpoint"] = {"metric": "loss"}
    forge(run / NEWEST, json.dumps(progress).encode())
    with pytest.raises(CheckpointError, match="the state of the callback ModelCheckpoint cannot be taken up: KeyError: 'best'"):
        fit(epochs=3, callbacks=[tpuflow.ModelCheckpoint(run, best="loss")], resume=run)


# --- the arrays -------------------------------------------------------------------------------------------------------


def rewrite(path, arrays):
    shutil.rmtree(path / "state")
    checkpoints._write_state(path / "state", arrays)
    write_sums(path)


def test_a_state_that_was_cut_before_it_was_hashed_is_refused(run):
    path = run / NEWEST
    for name in files(path / "state"):
        shutil.copytree(path, run.parent / "kept", symlinks=True)
        file = path / "state" / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        write_sums(path)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            found = checkpoints.read_newest(run)
        # A file of which nothing depends (Orbax's notes on when it was written) may be cut.
        assert found.path.name == GOOD or same_bits(found.arrays, checkpoints.read(run.parent / "kept").arrays), name
        shutil.rmtree(path)
        os.rename(run.parent / "kept", path)


def test_other_arrays_than_those_of_a_training_are_refused(run):
    rewrite(run / NEWEST, {"weights": np.ones(3)})
    refused(run, "holds something else than the named arrays of a training")


def test_arrays_that_inflate_a_thousandfold_are_refused_unread(run, monkeypatch):
    monkeypatch.setattr("tpuflow.archives.ALWAYS_READ_BYTES", 2**20)
    rewrite(run / NEWEST, {"params": {"a": np.zeros(2**24, np.float32)}})
    monkeypatch.setattr(
        checkpoints.ocp.StandardCheckpointHandler, "restore", _only_small(checkpoints.ocp.StandardCheckpointHandler.restore)
    )
    refused(run, "claim to hold arrays of 67108864 bytes; expected at most 100 times")


def _only_small(restore):
    def checked(self, directory, *args, **kwargs):
        assert NEWEST not in str(directory), "its arrays were read"
        return restore(self, directory, *args, **kwargs)

    return checked


# --- random damage ----------------------------------------------------------------------------------------------------

VALUES = (None, True, -1, 0, 1, 2**63, 10**30, 1.5, float("nan"), "", "x", "\ud800", [], [[]], {}, {"base64": "="}, {"base64": "AAAA"})


def _damage_bytes(content, rng):
    first, last = sorted(rng.integers(len(content) + 1, size=2))
    return (flipped(content, rng), content[:first], content[:last] + content[first:], b"")[rng.integers(4)] if content else b"x"


def _damage_tree(tree, rng):
    """The tree with one value replaced, left out, or repeated somewhere else."""
    owner, key, node = tree, "", tree
    while isinstance(node, (dict, list)) and node and (node is tree or rng.random() < 0.8):
        keys = list(node) if isinstance(node, dict) else range(len(node))
        owner, key = node, keys[rng.integers(len(keys))]
        node = owner[key]
    value = VALUES[rng.integers(len(VALUES))]
    if rng.random() < 0.2:
        del owner[key]
    else:
        owner[key] = [value, {key: value} if isinstance(key, str) else [value] * 3, copy.deepcopy(tree), owner[key]][
            rng.choice(4, p=(0.7, 0.1, 0.1, 0.1))
        ]
    return tree


def _damage(path, rng):
    """Damage one checkpoint; whether its hashes are right all the same, so that it is forged."""
    names = files(path)
    name = names[rng.integers(len(names))]
    kind = rng.integers(5)
    if kind == 0:
        (path / name).write_bytes(_damage_bytes((path / name).read_bytes(), rng))
    if kind == 1:
        (path / name).unlink()
    if kind == 2:
        (path / "state" / name).write_bytes(_damage_bytes((path / name).read_bytes(), rng)) if "/" not in name else (path / name).unlink()
    if kind == 3:
        name = ("training.json", "training.json", "state/_METADATA", "state/_CHECKPOINT_METADATA")[rng.integers(4)]
        (path / name).write_text(json.dumps(_damage_tree(json.loads((path / name).read_text()), rng)))
    if kind == 4:
        name = [n for n in names if n != SUMS][rng.integers(len(names) - 1)]
        (path / name).write_bytes(_damage_bytes((path / name).read_bytes(), rng))
    if kind >= 3:
        write_sums(path)
    return kind >= 3


@pytest.fixture
def training(saved, monkeypatch):
    """A training that is ready to take up a checkpoint, as often as one likes."""
    made = []
    with monkeypatch.context() as patch:
        patch.setattr(training_loop.Training, "run", lambda self, **_: made.append(self))
        fit(epochs=3, callbacks=[tpuflow.ModelCheckpoint(saved, best="loss")])
    (training,) = made
    training.restore(checkpoints.read(saved / NEWEST))
    return training


@pytest.mark.slow
def test_damage_and_forgery_of_any_kind_are_errors_of_the_checkpoint(saved, tmp_path, training):
    whole = checkpoints.read(saved / NEWEST)
    rng = np.random.default_rng(3)
    outcomes = {"refused": 0, "taken": 0, "another training": 0}
    for number in range(MUTANTS):
        shutil.copytree(saved, tmp_path / "run", symlinks=True)
        forged = _damage(tmp_path / "run" / NEWEST, rng)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = checkpoints.read_newest(tmp_path / "run", check_progress)
            fell_back = any("It is refused; step_00000003 is used instead" in str(w.message) for w in said)
            assert (found.path.name == GOOD) == fell_back, number
            if not forged:  # what is not refused is as it was written
                assert fell_back or (same_bits(found.arrays, whole.arrays) and found.progress == whole.progress), number
            try:
                training.restore(found)
                outcomes["refused" if fell_back else "taken"] += 1
            except CheckpointError:
                outcomes["another training"] += 1
        shutil.rmtree(tmp_path / "run")
    assert outcomes["refused"] > MUTANTS // 2 and min(outcomes.values()) > 0, outcomes
