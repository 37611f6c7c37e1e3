"""Locks that let one training at a time write checkpoints in a directory.

A training keeps the file directory/.writer open and locked with flock as long as it writes there; the file names the holder. The lock
belongs to the open file:

- Another process, and another training in this process, is refused before it touches anything.
- When the process ends, in whatever way, the kernel releases the lock. The file's content is then out of date, and is not read.
- A forked process (a data loader's) closes its copy of the file at once, so that one that outlives the training does not keep the lock.
- Between hosts the lock is as reliable as the file system's: NFS 4, NFS 3 with its lock service and Lustre with `flock` support it.
- On a file system without locks a warning is given, and unfinished checkpoints, which may be another training's, are not cleaned up.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
import warnings
import weakref
from pathlib import Path

from tpuflow.errors import CheckpointWriteError, one_line

LOCK = ".writer"
UNFINISHED, DELETED = ".unfinished-", ".deleted-"
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_HOLDER_BYTES = 1000

Path_ = str | os.PathLike[str]


class Lock:
    """The right to write in a directory; `exclusive` is false on a file system that has no locks."""

    def __init__(self, directory: Path):
        """Take the lock.

        Raises:
          CheckpointError: another training holds it; the message names it.
          OSError: the directory cannot be written.
        """
        self._path = directory / LOCK
        self._handle: int | None = None
        self.exclusive = True
        while self._handle is None:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                self.exclusive = _lock(handle, directory)
            except BaseException:
                os.close(handle)
                raise
            # Whoever held the lock may have removed the file after we opened it: then ours is a lock on nothing.
            if _is_at(handle, self._path):
                self._handle = handle
            else:
                os.close(handle)
        _held.add(self)
        try:
            _sign(self._handle)
        except OSError:
            self.release()
            raise

    def is_held(self) -> bool:
        """Whether the lock is still on the directory that now has this name."""
        return self._handle is not None and _is_at(self._handle, self._path)

    def release(self) -> None:
        """Give the lock back and remove its file, in this order: removed first, it cannot be taken by one who opened it meanwhile."""
        if self.is_held():
            try:
                self._path.unlink()
            except OSError:
                pass  # A file that nobody has locked hinders nobody.
        self.forget()

    def forget(self) -> None:
        """Close this process's copy of the file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class Claims:
    """The directories that one training writes checkpoints in; a context manager that gives them back."""

    def __init__(self) -> None:
        self._locks: dict[Path, Lock] = {}

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, *exc: object) -> None:
        while self._locks:
            self._locks.popitem()[1].release()

    def claim(self, directory: Path_) -> None:
        """Make the directory, be its one writer, and remove what a killed training left half written or half deleted there.

        Does nothing for a directory that is claimed already; one that was removed meanwhile is made again.

        Raises:
          CheckpointWriteError: another training writes there, or it cannot be made or written.
        """
        path = Path(directory).resolve()
        if path in self._locks and self._locks[path].is_held():
            return
        if path in self._locks:
            self._locks.pop(path).forget()
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = self._locks[path] = Lock(path)
            if lock.exclusive:
                _clean(path)
            tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=path).cleanup()
        except OSError as error:
            raise CheckpointWriteError(
                f"checkpoints: {directory} cannot be written: {error.strerror or one_line(error)}. Give a directory that can be, or make "
                "room there."
            ) from error


def not_written(directory: Path_) -> CheckpointWriteError:
    """What the other processes of a training say when the first one, which writes for all, could not."""
    return CheckpointWriteError(
        f"checkpoints: process 0, which writes those of all processes, could not write in {directory}: see its output."
    )


def _lock(handle: int, directory: Path) -> bool:
    """Lock an open file at once; false where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointWriteError(
            f"checkpoints: {directory} is being written by another training: {_holder(handle)}. Choose another directory, or wait until it "
            "has ended and go on from it with resume."
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"checkpoints: the file system of {directory} has no locks ({error.strerror}), so nothing keeps a second training from writing "
            "there too: see to it that none does.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def _sign(handle: int) -> None:
    """Write into the locked file who holds it."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}) + "\n"
    os.ftruncate(handle, 0)
    os.pwrite(handle, text.encode(), 0)


def _holder(handle: int) -> str:
    """Who holds the lock, in words, as far as the file says."""
    try:
        found = json.loads(os.pread(handle, _HOLDER_BYTES, 0))
        pid, host, since = int(found["pid"]), str(found["host"])[:100], str(found["since"])[:100]
    except (ValueError, TypeError, KeyError, RecursionError):
        return "it has only just begun"
    here = " (this process)" if (pid, host) == (os.getpid(), socket.gethostname()) else ""
    return f"process {pid}{here} on host {host!r}, since {since!r}"


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open file is the one that has this path."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except OSError:
        return False


def _clean(directory: Path) -> None:
    for entry in list(os.scandir(directory)):
        if entry.name.startswith((UNFINISHED, DELETED)):
            shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)


_held: weakref.WeakSet[Lock] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [lock.forget() for lock in list(_held)])
