"""SHA256SUMS, the list of a folder's files with their hashes: written when the folder is complete, checked before any file is read."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path

from tpuflow.errors import CheckpointError, short

SUMS = "SHA256SUMS"
_SUM = re.compile(r"([0-9a-f]{64})  (\S.*)")


def write_sums(folder: Path) -> None:
    """Write the list of all other files."""
    lines = (f"{digest(folder / name)}  {name}\n" for name in files(folder) if name != SUMS)
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def check_sums(folder: Path, needs: tuple[str, ...]) -> None:
    """Check that a folder holds exactly the files of its list, as they were written. needs: files, or folders of files, that must be
    listed.

    Only regular files inside the folder are opened, whatever the list names.

    Raises:
      CheckpointError: the list or a file is missing, damaged or not listed; or something there is no file of its own (a link, a pipe).
    """
    found = set(files(folder))
    if SUMS not in found:
        raise CheckpointError(f"checkpoint {folder}: {SUMS} is missing: it is cut short, or not a checkpoint of tpuflow.train.")
    sums = _listed(folder)
    for need in needs:
        if not any(name == need or name.startswith(f"{need}/") for name in sums):
            raise CheckpointError(f"checkpoint {folder}: {SUMS} is damaged: it lists no {need}.")
    for name, expected in sums.items():
        if name not in found:
            raise CheckpointError(f"checkpoint {folder}: the file {_shown(name)}, listed in {SUMS}, is missing.")
        if _digest(folder, name) != expected:
            raise CheckpointError(f"checkpoint {folder}: the file {_shown(name)} is damaged: its SHA-256 is not the one in {SUMS}.")
    for name in sorted(found - set(sums) - {SUMS}):
        raise CheckpointError(f"checkpoint {folder}: the file {_shown(name)} is not listed in {SUMS}: it is not part of what was saved.")


def files(folder: Path) -> list[str]:
    """All files in a folder and the folders in it, by their paths from there, sorted.

    Raises:
      CheckpointError: something there is neither a file nor a folder, or cannot be looked at.
    """
    found, folders = [], [""]
    try:
        while folders:
            inside = folders.pop()
            for entry in os.scandir(folder / inside):
                name = f"{inside}{entry.name}"
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    folders.append(f"{name}/")
                elif stat.S_ISREG(mode):
                    found.append(name)
                else:
                    raise CheckpointError(f"checkpoint {folder}: {_shown(name)} is a link, a pipe or a device; expected files of its own.")
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: cannot be read: {error.strerror or error}.") from error
    return sorted(found)


def digest(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(file, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _shown(name: str) -> str:
    return name if name.isprintable() and len(name) <= 200 else short(name)


def _digest(folder: Path, name: str) -> str:
    try:
        return digest(folder / name)
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: the file {_shown(name)} cannot be read: {error.strerror or error}.") from error


def _listed(folder: Path) -> dict[str, str]:
    """Hashes by the files' names, as the list has them."""
    try:
        *lines, end = (folder / SUMS).read_text(encoding="utf-8").split("\n")
    except (UnicodeDecodeError, OSError):
        lines, end = [], "unreadable"
    found = [_SUM.fullmatch(line) for line in lines]
    sums = {match[2]: match[1] for match in found if match is not None}
    # Every line is ended, and there is one for each file.
    if end or not sums or len(sums) != len(lines):
        raise CheckpointError(f"checkpoint {folder}: {SUMS} is damaged.")
    return sums
