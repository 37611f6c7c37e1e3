"""Checkpoints on disk: arrays written by Orbax, progress as JSON, the SHA-256 of every file; each appears whole or not at all.

directory/
  step_00000120/
    state/           an Orbax checkpoint: {"params": ..., "carried": ..., "opt_state": ..., "key": ...}, keys of a tree as names
    training.json    position, history, callbacks' state, fingerprint
    SHA256SUMS       a line for each file, written last; `sha256sum -c SHA256SUMS` checks it by hand
  best -> step_00000120
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from tpuflow.errors import CheckpointError

FORMAT = 1
STATE, PROGRESS, SUMS, BEST = "state", "training.json", "SHA256SUMS", "best"
UNFINISHED, DELETED = ".unfinished-", ".deleted-"
_NAME = re.compile(r"step_(\d{8,})")
_SUM = re.compile(r"([0-9a-f]{64})  (\S.*)")

Path_ = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was read: arrays as nested dicts by the names of their places in the state, and the progress."""

    path: Path
    arrays: dict[str, Any]
    progress: dict[str, Any]


def folder(directory: Path_, step: int) -> Path:
    """Where the checkpoint after so many steps lies."""
    return Path(directory) / f"step_{step:08d}"


def saved_steps(directory: Path_) -> list[int]:
    """The steps of all checkpoints in a directory, ascending; whether they are good is not looked at."""
    if not Path(directory).is_dir():
        return []
    return sorted(int(match[1]) for entry in os.scandir(directory) if entry.is_dir() and (match := _NAME.fullmatch(entry.name)))


def save(directory: Path_, step: int, arrays: Mapping[str, Any], progress: Mapping[str, Any]) -> Path:
    """Write a checkpoint under a temporary name, then rename it; one that has its name already is replaced.

    Raises:
      CheckpointError: the directory cannot be written, or the state of the data or of a callback is nothing that JSON can hold.
    """
    target = folder(directory, step)
    text = _as_json({"format": FORMAT, **progress})
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f"{UNFINISHED}{target.name}-", dir=directory))
        os.chmod(temporary, 0o755)
        _write_state(temporary / STATE, arrays)
        (temporary / PROGRESS).write_text(text)
        (temporary / SUMS).write_text("".join(f"{digest(file)}  {file.relative_to(temporary).as_posix()}\n" for file in _files(temporary)))
        _flush(temporary)
        delete(target)
        os.rename(temporary, target)
        _flush_entry(Path(directory))
    except OSError as error:
        raise CheckpointError(f"checkpoint {target}: cannot be written: {error.strerror or error}.") from error
    return target


def delete(path: Path) -> None:
    """Remove a checkpoint: renamed first, so that one half removed is never taken for whole."""
    if path.exists():
        gone = Path(tempfile.mkdtemp(prefix=DELETED, dir=path.parent))
        os.rename(path, gone / path.name)
        shutil.rmtree(gone)


def open_directory(directory: Path_) -> None:
    """Make the directory and remove what a killed training left half written or half deleted there.

    Raises:
      CheckpointError: it cannot be made or written.
    """
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        for entry in list(os.scandir(directory)):
            if entry.name.startswith((UNFINISHED, DELETED)):
                shutil.rmtree(entry.path)
        tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=directory).cleanup()
    except OSError as error:
        raise CheckpointError(f"checkpoints: {directory} cannot be written: {error.strerror or error}.") from error


def point(directory: Path_, step: int) -> None:
    """Let the link `best` name the checkpoint of a step."""
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=directory) as temporary:
        os.symlink(folder("", step), Path(temporary) / BEST)
        os.replace(Path(temporary) / BEST, Path(directory) / BEST)


def pointed(directory: Path_) -> int | None:
    """The step of the checkpoint that `best` names."""
    link = Path(directory) / BEST
    match = _NAME.fullmatch(os.readlink(link)) if link.is_symlink() else None
    return int(match[1]) if match else None


def verify(path: Path) -> None:
    """That a checkpoint is whole: every file there, and as it was written.

    Raises:
      CheckpointError: it is cut short, damaged, or no checkpoint.
    """
    if not (path / SUMS).is_file():
        raise CheckpointError(f"checkpoint {path}: {SUMS} is missing: it is cut short, or not a checkpoint of tpuflow.train.")
    lines = (path / SUMS).read_text(errors="replace").split("\n")
    found = [_SUM.fullmatch(line) for line in lines[:-1]]
    # The progress is the last in the list, and its line is ended: a list cut short is noticed.
    if lines[-1] or not found or found[-1] is None or found[-1][2] != PROGRESS:
        raise CheckpointError(f"checkpoint {path}: {SUMS} is damaged.")
    for match in found:
        if match is None:
            raise CheckpointError(f"checkpoint {path}: {SUMS} is damaged.")
        file = path / match[2]
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path}: the file {match[2]}, listed in {SUMS}, is missing.")
        if digest(file) != match[1]:
            raise CheckpointError(f"checkpoint {path}: the file {match[2]} is damaged: its SHA-256 is not the one in {SUMS}.")


def is_good(path: Path) -> bool:
    """Whether a checkpoint is whole."""
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def read(path: Path_) -> Checkpoint:
    """Read one checkpoint.

    Raises:
      CheckpointError: it is damaged, or of another version.
    """
    path = Path(path).resolve()
    verify(path)
    progress = json.loads((path / PROGRESS).read_text(), object_hook=_from_json)
    if progress.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {path}: its format is {progress.get('format')}, this version of tpuflow reads {FORMAT}.")
    return Checkpoint(path, read_state(path / STATE), progress)


def read_newest(directory: Path_) -> Checkpoint | None:
    """The newest good checkpoint of a directory (or the one checkpoint that the path is); None if there is none at all.

    One that is damaged is refused with a warning, and the one before it is read.

    Raises:
      CheckpointError: there are some, but none is good; or the path is a file.
    """
    path = Path(directory)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"resume: {path} is a file; expected a directory of checkpoints, or one checkpoint in it.")
    if is_checkpoint(path):
        return read(path)
    refused = []
    for step in reversed(saved_steps(path)):
        try:
            found = read(folder(path, step))
        except CheckpointError as error:
            refused.append(str(error))
            continue
        for problem in refused:
            warnings.warn(f"{problem} It is refused; {found.path.name} is used instead.", RuntimeWarning, stacklevel=2)
        return found
    if refused:
        raise CheckpointError("resume: no checkpoint is good.\n  " + "\n  ".join(refused) + "\nGive another directory to start anew.")
    return None


def is_checkpoint(path: Path) -> bool:
    """Whether the path is one checkpoint of ours rather than a directory of them, or nothing."""
    return path.is_dir() and ((path / SUMS).is_file() or (path / PROGRESS).is_file() or _NAME.fullmatch(path.resolve().name) is not None)


def read_state(path: Path) -> dict[str, Any]:
    """The arrays of any Orbax checkpoint of a tree, as nested dicts of NumPy arrays."""
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="orbax")
        return reader.restore(path.resolve())


def digest(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(file, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _write_state(path: Path, arrays: Mapping[str, Any]) -> None:
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
        writer.save(path.resolve(), dict(arrays))


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def _flush(path: Path) -> None:
    """Have the disk hold what was written, so that not even a power cut leaves a name without its content."""
    for file in (*_files(path), *(entry for entry in path.rglob("*") if entry.is_dir()), path):
        _flush_entry(file)


def _flush_entry(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _as_json(progress: Mapping[str, Any]) -> str:
    def encode(value: Any) -> Any:
        if isinstance(value, bytes):
            return {"base64": base64.b64encode(value).decode()}
        if isinstance(value, (np.generic, np.ndarray)):
            return value.tolist()
        raise TypeError(f"{type(value).__name__} is nothing that JSON can hold")

    try:
        return json.dumps(progress, default=encode) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint: the state of the data, or of a callback, cannot be saved: {error}.") from error


def _from_json(value: dict[str, Any]) -> Any:
    return base64.b64decode(value["base64"]) if set(value) == {"base64"} else value
