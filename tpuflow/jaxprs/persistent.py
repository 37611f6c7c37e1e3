"""The persistent compilation cache: its folder, and the keys of its entries."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import warnings
from collections.abc import Iterable
from pathlib import Path

import jax

from tpuflow.entries import Entries, entries_in
from tpuflow.errors import ConfigError

FOLDER, LIMIT = "TPUFLOW_CACHE", "TPUFLOW_CACHE_BYTES"
OFF = "off"
LIMIT_BYTES = 4 * 2**30
PACKAGE = Path(__file__).parents[1]
COMPILED_BY = ("chips", "compiler.py", "device", "dtypes.py", "isa", "jaxprs", "lower")
"""The parts of the package that determine what a graph is compiled to."""


def kept_entries() -> Entries | None:
    """The folder that $TPUFLOW_CACHE names, else the folder `tpuflow` in that of `jax_compilation_cache_dir`; None if neither is set, or
    $TPUFLOW_CACHE is "off".

    Raises:
      ConfigError: the folder that $TPUFLOW_CACHE names cannot be used, or $TPUFLOW_CACHE_BYTES is no number of bytes.
    """
    named = os.environ.get(FOLDER)
    if named:
        return None if named == OFF else entries_in(Path(named).absolute(), _limit_bytes())
    of_jax = jax.config.values["jax_compilation_cache_dir"]
    if not of_jax or "://" in of_jax or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    return _beside_jax(Path(of_jax).absolute() / "tpuflow", _limit_bytes())


def key_of(*parts: str | bytes) -> str:
    """The cache key for some data: a hash of the data, the compiler's source files and the versions of JAX."""
    return _hash(part.encode() if isinstance(part, str) else part for part in (_code(), *_versions(), *parts))


@functools.cache
def _versions() -> tuple[str, ...]:
    return tuple(map(importlib.metadata.version, ("jax", "jaxlib")))


@functools.cache
def _beside_jax(folder: Path, limit_bytes: int) -> Entries | None:
    """The cache inside of JAX's own cache folder; None, with a warning, if the folder cannot be used, as JAX handles it too."""
    try:
        return entries_in(folder, limit_bytes)
    except ConfigError as problem:
        warnings.warn(f"{problem} Nothing is kept.", RuntimeWarning, stacklevel=3)
        return None


def _limit_bytes() -> int:
    text = os.environ.get(LIMIT) or str(LIMIT_BYTES)
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{LIMIT}={text!r}; expected how many bytes the compilation cache may take, such as {LIMIT_BYTES}.")
    return int(text)


@functools.cache
def _code() -> bytes:
    """A hash of the compiler's source files, since the package's version does not change with every line."""
    files = sorted(path for part in COMPILED_BY for path in ((PACKAGE / part).rglob("*.py") if "." not in part else (PACKAGE / part,)))
    return _hash(data for path in files for data in (path.relative_to(PACKAGE).as_posix().encode(), path.read_bytes())).encode()


def _hash(parts: Iterable[bytes]) -> str:
    """SHA-256 (hex) of byte strings, each with its length, so that none can run into the next."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
