"""Download a file once into the user's cache: several mirrors, a checksum, and an atomic rename at the end."""

from __future__ import annotations

import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from tpuflow.errors import DataError

CHUNK_BYTES = 1 << 18
TIMEOUT_SECONDS = 20


class UnreachableError(DataError):
    """No mirror answered."""


def fetch(urls: Sequence[str], target: Path, sha256: Sequence[str]) -> None:
    """Write `target` from the first of `urls` that answers with one of the `sha256`.

    Raises UnreachableError if no mirror answers, DataError if one answers with something else and no other is better.
    """
    problems: list[str] = []
    damaged = False
    for url in urls:
        try:
            return _fetch_one(url, target, sha256)
        except _WrongContentError as error:
            damaged = True
            problems.append(f"{url}: {error}")
        except (OSError, http.client.HTTPException) as error:
            problems.append(f"{url}: {getattr(error, 'reason', None) or error}")
    kind = DataError if damaged else UnreachableError
    raise kind(f"{target.name} could not be downloaded ({'; '.join(problems)})")


class _WrongContentError(Exception):
    """A mirror sent bytes with another checksum."""


def _fetch_one(url: str, target: Path, sha256: Sequence[str]) -> None:
    """The file appears under its name only when it is whole and right, so an interrupted download leaves nothing behind."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as part:
            try:
                digest = _copy(answer, part, target.name)
                if digest not in sha256:
                    raise _WrongContentError(f"sha256 {digest}, expected {' or '.join(sha256)}")
                part.close()
                os.replace(part.name, target)
            except BaseException:
                part.close()
                os.unlink(part.name)
                raise


def _copy(answer: http.client.HTTPResponse, part, name: str) -> str:
    digest = hashlib.sha256()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"downloading {name}", total=int(answer.headers.get("Content-Length") or 0) or None)
        while chunk := answer.read(CHUNK_BYTES):
            part.write(chunk)
            digest.update(chunk)
            progress.advance(task, len(chunk))
    return digest.hexdigest()
