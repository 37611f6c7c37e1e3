"""The launch of Programs and the way of results to the host in C (`shim.c`), which is compiled when it is first needed, and kept in the
user's cache.

Where there is no C compiler, or `TPUFLOW_SHIM=off`, both are Python's.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from tpuflow.data.places import cache_dir
from tpuflow.entries import own_folder
from tpuflow.errors import ConfigError
from tpuflow.once import once
from tpuflow.pjrt.buffer import BYTES, CODE, COMPLEX, DELETED, EXTERNAL_REFERENCES, SHARED_BY
from tpuflow.pjrt.cells import Numbers
from tpuflow.pjrt.failures import PjrtError
from tpuflow.pjrt.fields import READY
from tpuflow.pjrt.handles import ARRAYS, INDEX, NATIVE, OBJECT, OBJECTS, WORDS
from tpuflow.pjrt.settings import OFF, SHIM
from tpuflow.pjrt.shutdown import SHUTDOWN
from tpuflow.pjrt.table import TABLES, Table
from tpuflow.pjrt.types import CODES, NUMPY, PACKED

ENTRIES = {"execute": "LoadedExecutable_Execute", "to_host": "Buffer_ToHostBuffer"}
"""The functions of shim.c -> the entries that they take the place of."""
FLAGS = ("-bundle", "-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-shared", "-fPIC")
LAUNCH = 7
"""The word of an executable's header that holds the address of its `Launch`; 0 if Python launches it."""
PLAIN = NUMPY.keys() - PACKED - {CODES[COMPLEX]}
"""The codes of types that lie on the device as the host has them."""
COMPILERS = ("cc", "gcc", "clang")
"""Which one compiles, the first that there is, unless the variable `CC` names one."""
COMPILE_SECONDS = 60.0

_log = logging.getLogger("tpuflow.pjrt")

NAMES = {
    "begun": "begun", "consume": "consume_with_handlers", "gone": "deleted", "over": "destroyed", "wait": "block_until_ready",
    "pointer": "unsafe_buffer_pointer",
}  # fmt: skip
"""The attributes and methods that it reads and calls."""
WORDS_READ = {
    "launch": LAUNCH, "code": CODE, "deleted": DELETED, "bytes": BYTES, "index": INDEX, "object": OBJECT, "arrays": ARRAYS, "words": WORDS,
}  # fmt: skip
"""The words of headers that it reads, and how many there are."""


class State(ctypes.Structure):
    """`struct state` of shim.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*ENTRIES, "list")),
        *((name, ctypes.py_object) for name in ("objects", "references", "shared", "shutdown", "none", "failed", *NAMES)),
        *((name, ctypes.c_int64) for name in WORDS_READ),
        *((name, ctypes.c_uint64) for name in ("ready", "plain")),
    )


class Launch(ctypes.Structure):
    """`struct launch` of shim.c.

    execute, handlers: as `tpuflow.jaxprs.plugins.Launcher` has them. zero: the array that every launch takes first. check(): raises if the
    memory has no room. given(results): the first handle of the results' buffers. failed(error): that of a `PJRT_Error`.
    """

    _fields_ = (
        *((name, ctypes.py_object) for name in ("execute", "handlers", "zero", "check", "given", "failed")),
        *((name, ctypes.c_int64) for name in ("count", "donations")),
        *((name, ctypes.c_void_p) for name in ("order", "donated")),
    )

    def __init__(self, *objects: Any, order: Sequence[int], donated: Sequence[int]):
        self.kept = places = Numbers(order), Numbers(donated)
        super().__init__(*objects, len(order), len(donated), *(p.address for p in places))


class Shim:
    """The compiled shim, in place of a table's entries.

    Raises:
      OSError: it cannot be compiled or loaded; the message says why.
    """

    def __init__(self, table: Table):
        if NATIVE is None:
            raise OSError("there is no list of what C destroyed: the host does not let a process make code")
        self.library = ctypes.CDLL(os.fspath(compiled()))
        self.state = State.in_dll(self.library, "state")
        tables = {"objects": OBJECTS, "references": EXTERNAL_REFERENCES, "shared": SHARED_BY}
        others = {"shutdown": SHUTDOWN, "none": None, "failed": lambda error: PjrtError(error).handle}
        numbers = {"list": NATIVE.head, "ready": READY, "plain": sum(1 << code for code in PLAIN)}
        in_python = {function: table[entry] for function, entry in ENTRIES.items()}
        for name, value in (tables | others | numbers | in_python | NAMES | WORDS_READ).items():
            setattr(self.state, name, value)
        for function, entry in ENTRIES.items():
            table[entry] = ctypes.cast(getattr(self.library, function), ctypes.c_void_p).value or 0


@once
def shim() -> Shim | None:
    """The shim, which is in JAX's table from the first call on; None where there is none, and Python launches every Program."""
    (table,) = TABLES
    try:
        return Shim(table)
    except OSError as problem:
        _log.info("launches are Python's: %s", problem)
        return None


def compiled() -> Path:
    """The shim's library in the user's cache, compiled if it is not there yet.

    Raises:
      OSError: the environment forbids it; there is no compiler, or it fails; the cache cannot be written, or is not this user's alone.
    """
    if os.environ.get(SHIM) == OFF:
        raise OSError(f"{SHIM}={OFF}")
    source = resources.files("tpuflow.pjrt").joinpath("shim.c").read_bytes()
    key = hashlib.sha256(b"\n".join([source, platform.machine().encode(), *map(str.encode, FLAGS)])).hexdigest()[:16]
    try:
        folder = own_folder(cache_dir() / "shim")
    except ConfigError as error:
        raise OSError(str(error)) from None
    found = folder / f"{key}.so"
    if not found.is_file():
        _compile(source, found)
    return found


def _compile(source: bytes, target: Path) -> None:
    """Compile to a file, which is there as a whole or not at all."""
    asked = os.environ.get("CC")
    known = [shlex.split(asked)] if asked else [[name] for name in COMPILERS]
    compiler = next((command for command in known if shutil.which(command[0])), None)
    if compiler is None:
        raise OSError(f"no C compiler ({', '.join(command[0] for command in known)})")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [*compiler, "-O2", *FLAGS, "-o", os.fspath(made), "-x", "c", "-"]
        try:
            done = subprocess.run(command, input=source, stderr=subprocess.PIPE, timeout=COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            raise OSError(f"{compiler[0]} took over {COMPILE_SECONDS:g} s") from None
        if done.returncode:
            raise OSError(f"{compiler[0]}: {done.stderr.decode(errors='replace').strip()}")
        os.replace(made, target)
