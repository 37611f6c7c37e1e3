"""A persistent cache of byte strings in a folder: entries are written atomically, checked when read, and evicted least recently used first.

Entries are trusted like the user's own programs, since some of them are XLA's machine code. Therefore the folder and every file must belong
to this user and not be writable by others; what somebody else has put there is not read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tpuflow.errors import ConfigError

MAGIC = b"tpuflow entry 1\n"
SUFFIX, PARTIAL = ".entry", ".partial"
ABANDONED_SECONDS = 3600.0
"""A temporary file of this age was left by a process that was killed, and is removed."""
_HEAD_BYTES = len(MAGIC) + hashlib.sha256().digest_size
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Entries:
    """Bytes by name in a folder, at most `limit_bytes` of them; several processes may use it at once."""

    folder: Path
    limit_bytes: int

    def get(self, name: str) -> bytes | None:
        """The content of an entry, which is now the most recently used; None if there is none. A damaged entry, or one that is not this
        user's, is removed with a warning."""
        path = self.folder / f"{name}{SUFFIX}"
        try:
            found = _read_own(path)
        except FileNotFoundError:
            return None
        except (OSError, _UnfitError) as problem:
            self.discard(name, str(problem))
            return None
        with contextlib.suppress(OSError):  # another process has just removed it
            os.utime(path)
        return found

    def put(self, name: str, content: bytes) -> None:
        """Write an entry, and evict others beyond the limit. If it cannot be written, warn."""
        if _HEAD_BYTES + len(content) > self.limit_bytes:
            return
        try:
            self._write(self.folder / f"{name}{SUFFIX}", MAGIC + hashlib.sha256(content).digest() + content)
            self._shrink()
        except OSError as error:
            _warn(f"{self.folder}: the compilation cache cannot be written ({error.strerror or error}); the compilation itself is good.")

    def discard(self, name: str, problem: str) -> None:
        """Remove an entry that cannot be used, with a warning that says why."""
        path = self.folder / f"{name}{SUFFIX}"
        _warn(f"{path}: {problem}; the entry is ignored, and written anew.")
        with contextlib.suppress(OSError):
            path.unlink()

    def _write(self, path: Path, data: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self.folder, suffix=PARTIAL, delete=False) as partial:  # made readable by its owner alone
            try:
                partial.write(data)
                partial.close()
                os.replace(partial.name, path)
            except BaseException:
                partial.close()
                Path(partial.name).unlink(missing_ok=True)
                raise

    def _shrink(self) -> None:
        now, files = time.time(), sorted(_used(self.folder), key=lambda file: file[0])
        too_many = sum(size for _, size, _ in files) - self.limit_bytes
        for used, size, path in files:
            if too_many > 0 or (path.suffix == PARTIAL and now - used > ABANDONED_SECONDS):
                path.unlink(missing_ok=True)
                too_many -= size


@cache
def entries_in(folder: Path, limit_bytes: int) -> Entries:
    """The entries of a folder, which is made if it is not there.

    Raises:
      ConfigError: it cannot be made, or others than this user own it or may write to it.
    """
    return Entries(own_folder(folder), limit_bytes)


def own_folder(folder: Path) -> Path:
    """A folder for what this process will run, which is made if it is not there.

    Raises:
      ConfigError: it cannot be made, or others than this user own it or may write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"the compilation cache {folder} cannot be made ({error.strerror}); name a folder that can be written, or none."
        ) from None
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"the compilation cache {folder} is no folder of its own; name one, not a link.")
    if problem := _foreign(status):
        raise ConfigError(
            f"the compilation cache {folder} {problem}, who could have this process run their code; expected a folder that is yours, as "
            f"`chmod 700` makes it."
        )
    return folder


class _UnfitError(Exception):
    """An entry must not be read; the message says why."""


def _read_own(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _UnfitError("no file")
        if problem := _foreign(status):
            raise _UnfitError(problem)
        data = file.read()
    content = data[_HEAD_BYTES:]
    if data[:_HEAD_BYTES] != MAGIC + hashlib.sha256(content).digest():
        raise _UnfitError(f"damaged: the checksum of its {len(data)} bytes does not match")
    return content


def _foreign(status: os.stat_result) -> str:
    """Why a file or folder is not this user's alone, in words; "" if it is. (On Windows, where users' folders are private, it always
    is.)"""
    if os.name != "posix":
        return ""
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})" if status.st_mode & _OTHERS_WRITE else ""


def _used(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """(when it was used last, bytes, path) of every file of ours."""
    for path in folder.iterdir():
        if path.suffix in (SUFFIX, PARTIAL):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                yield status.st_mtime, status.st_size, path


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)
