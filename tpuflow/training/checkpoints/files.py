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
import json
import math
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from tpuflow.archives import check_inflation
from tpuflow.errors import ArchiveError, CheckpointError, CheckpointWriteError, one_line
from tpuflow.jaxprs.processes import number
from tpuflow.training.checkpoints.locking import DELETED, UNFINISHED
from tpuflow.training.checkpoints.sums import SUMS, check_sums, files, write_sums

FORMAT = 2
REMOVALS, REMOVAL_SECONDS = 40, 0.05  # tries, and the time between them, to remove what is still being written
STATE, PROGRESS, BEST = "state", "training.json", "best"
_NAME = re.compile(r"step_(\d{8,})")
_SYSTEM_ERROR = re.compile(r"os_error_code='(\d+)'")

Path_ = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was read: its arrays, as nested dicts by their paths in the state, and the content of training.json."""

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

    If it cannot be written, nothing of it stays behind, and the other checkpoints are as they were. The directory is there, and the
    caller's alone (`tpuflow.training.checkpoints.locking`).

    Raises:
      CheckpointWriteError: the directory cannot be written: the disk is full, for example.
      CheckpointError: the state of the data or of a callback is nothing that JSON can hold.
    """
    target = folder(directory, step)
    text = _as_json({"format": FORMAT, **progress})
    with _writing(target):
        temporary = Path(tempfile.mkdtemp(prefix=f"{UNFINISHED}{target.name}-", dir=directory))
        try:
            os.chmod(temporary, 0o755)
            _write_state(temporary / STATE, arrays)
            (temporary / PROGRESS).write_text(text, encoding="utf-8")
            write_sums(temporary)
            _flush(temporary)
            delete(target)
            os.rename(temporary, target)
            _flush_entry(Path(directory))
        finally:
            _remove(temporary)  # there only if it was not renamed
    return target


def save_variables(path: Path_, arrays: Mapping[str, Any]) -> None:
    """Write a tree of arrays as an Orbax checkpoint into a new directory, which appears whole or not at all.

    Raises:
      CheckpointError: the directory is there already, or cannot be written.
    """
    target = Path(path)
    if target.exists():
        raise CheckpointError(f"save: {str(target)!r} is there already; give a new directory.")
    with _writing(target):
        temporary = Path(tempfile.mkdtemp(prefix=f"{UNFINISHED}{target.name}-", dir=target.parent))
        try:
            _write_state(temporary / STATE, arrays)
            _flush(temporary)
            os.rename(temporary / STATE, target)
            _flush_entry(target.parent)
        finally:
            _remove(temporary)


def _remove(folder: Path) -> None:
    """Remove a folder in which threads of Orbax, whose save has failed in another one, may still be writing."""
    for _ in range(REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(REMOVAL_SECONDS)


def delete(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that one that is half removed is never taken for a whole one.

    Raises:
      CheckpointWriteError: the directory cannot be written.
    """
    gone = path.with_name(f"{DELETED}{path.name}")
    with _writing(path):
        for there in (gone, path):
            if there.is_dir() and not there.is_symlink():
                os.replace(there, gone)
                shutil.rmtree(gone)
            else:
                there.unlink(missing_ok=True)


def point(directory: Path_, step: int) -> None:
    """Let the link `best` name the checkpoint of a step.

    Raises:
      CheckpointWriteError: the directory cannot be written.
    """
    with _writing(Path(directory) / BEST), tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=directory) as temporary:
        os.symlink(folder("", step), Path(temporary) / BEST)
        os.replace(Path(temporary) / BEST, Path(directory) / BEST)


def pointed(directory: Path_) -> int | None:
    """The step of the checkpoint that `best` names."""
    link = Path(directory) / BEST
    match = _NAME.fullmatch(os.readlink(link)) if link.is_symlink() else None
    return int(match[1]) if match else None


def verify(path: Path) -> None:
    """Check that a checkpoint is complete, and every file as it was written.

    Raises:
      CheckpointError: it is cut short, damaged, or no checkpoint.
    """
    if path.is_symlink():
        raise CheckpointError(f"checkpoint {path}: is a link to {os.readlink(path)!r}; give the path of the checkpoint itself.")
    check_sums(path, (STATE, PROGRESS))


def is_good(path: Path) -> bool:
    """Whether a checkpoint is whole."""
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def read(path: Path_) -> Checkpoint:
    """Read one checkpoint, or the one that a link such as `best` names.

    Raises:
      CheckpointError: it is damaged, forged, or of another version.
    """
    return _read(Path(path).resolve())


def _read(path: Path) -> Checkpoint:
    verify(path)
    progress = _progress(path)
    arrays = read_state(path / STATE)
    if not isinstance(arrays, dict) or not isinstance(arrays.get("params"), dict) or not _holds_arrays(arrays):
        raise CheckpointError(f"checkpoint {path}: {STATE} holds something else than the named arrays of a training.")
    return Checkpoint(path, arrays, progress)


def _progress(path: Path) -> dict[str, Any]:
    """The content of training.json."""
    try:
        found = json.loads((path / PROGRESS).read_text(encoding="utf-8"), object_hook=_from_json)
    except (ValueError, TypeError, RecursionError, OSError) as error:
        raise CheckpointError(f"checkpoint {path}: {PROGRESS} is not JSON as tpuflow.train writes it: {one_line(error)}.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"checkpoint {path}: {PROGRESS} holds a {type(found).__name__}; expected an object with names.")
    if found.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {path}: its format is {found.get('format')!r}, this version of tpuflow reads {FORMAT}.")
    return found


def _holds_arrays(tree: Mapping[str, Any]) -> bool:
    return all(_holds_arrays(child) if isinstance(child, dict) else isinstance(child, np.ndarray) for child in tree.values())


def read_newest(directory: Path_, accept: Callable[[Checkpoint], None] = lambda checkpoint: None) -> Checkpoint | None:
    """The newest good checkpoint of a directory (or the one checkpoint that the path is); None if there is none at all.

    One that is damaged, or that `accept` refuses by a CheckpointError, is refused with a warning, and the one before it is read.

    Raises:
      CheckpointError: there are some, but none is good; or the path is a file.
    """
    path = Path(directory)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"resume: {path} is a file; expected a directory of checkpoints, or one checkpoint in it.")
    if is_checkpoint(path):
        found = read(path)
        accept(found)
        return found
    refused = []
    for step in reversed(saved_steps(path)):
        try:
            found = _read(folder(path.resolve(), step))
            accept(found)
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
    """The arrays of any Orbax checkpoint of a tree, as nested dicts of NumPy arrays.

    Raises:
      CheckpointError: it is none, it is damaged, or it claims arrays far larger than what is stored.
    """
    path = path.resolve()
    with _orbax() as reader, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="orbax")
        try:
            stored_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            check_inflation(f"checkpoint {path}", _declared_bytes(reader.metadata(path).item_metadata.tree), stored_bytes)
            return reader.restore(path)
        except ArchiveError as error:
            raise CheckpointError(str(error)) from error
        except Exception as error:  # Orbax and TensorStore fail on damaged or forged metadata in any way it happens to
            raise CheckpointError(f"checkpoint {path}: Orbax cannot read it: {one_line(error)}.") from error


def _declared_bytes(tree: Any) -> int:
    """The bytes of the arrays of an Orbax checkpoint, according to its metadata."""
    if isinstance(tree, (Mapping, list, tuple)):
        return sum(map(_declared_bytes, tree.values() if isinstance(tree, Mapping) else tree))
    return math.prod(tree.shape) * np.dtype(tree.dtype).itemsize if isinstance(tree, ocp.metadata.ArrayMetadata) else 0


def _write_state(path: Path, arrays: Mapping[str, Any]) -> None:
    with _orbax() as writer:
        writer.save(path.resolve(), dict(arrays))


def _orbax() -> ocp.Checkpointer:
    """A checkpointer for this process alone: of several processes each reads by itself, and one writes."""
    own = number()
    alone = ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process {own}")
    return ocp.Checkpointer(ocp.StandardCheckpointHandler(multiprocessing_options=alone), multiprocessing_options=alone)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn errors while a checkpoint is written into `CheckpointWriteError`s. TensorStore raises ValueErrors with the errno in their
    text."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        number = error.errno if isinstance(error, OSError) else next((int(n) for n in _SYSTEM_ERROR.findall(str(error))), None)
        reason = one_line(error) if number is None else os.strerror(number)
        raise CheckpointWriteError(f"checkpoint {path}: cannot be written: {reason}.") from error


def _flush(path: Path) -> None:
    """Flush all files and folders to disk (fsync), so that not even a power cut leaves a name without its content."""
    for file in (*(path / name for name in files(path)), *(entry for entry in path.rglob("*") if entry.is_dir()), path):
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
