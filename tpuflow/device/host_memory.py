"""Host memory: its size, and the error that says what a launch asked for and what there was when an allocation fails."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from types import TracebackType

from tpuflow.errors import HostMemoryError
from tpuflow.isa.program import Program

MEMORY_FILE = Path("/proc/meminfo")
CONTROL_GROUP_FILE = Path("/sys/fs/cgroup/memory.max")
_ASKED = re.compile(r"allocating (\d+) bytes")
_AVAILABLE = re.compile(r"MemAvailable:\s*(\d+) kB")


class host_memory:
    """A reusable context that turns failed allocations into `HostMemoryError`; several threads may be in it.

    It is a class since every launch enters it, and `contextlib.contextmanager` takes ten times as long.

    Raises:
      HostMemoryError: the host has not as much memory as the launch asks for.
    """

    __slots__ = ("_program",)

    def __init__(self, program: Program):
        self._program = program

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if error is None or not isinstance(error, (MemoryError, RuntimeError)):  # NumPy's, and XLA's
            return
        if isinstance(error, MemoryError) or str(error).startswith("RESOURCE_EXHAUSTED"):
            raise _error(self._program, str(error)) from error


def _error(program: Program, text: str) -> HostMemoryError:
    asked, there = _ASKED.search(text), available_bytes()
    what = f"asked for {int(asked[1]):,} bytes at once" if asked else f"was refused memory ({text.splitlines()[0]})"
    has = "" if there is None else f"; the host has {there:,} bytes available"
    held = sum(b.bytes for b in program.buffers)
    return HostMemoryError(
        f"host out of memory: the program {program.name or '(no name)'!r} {what}{has}. Its buffers are {held:,} bytes in all. Use a "
        "smaller batch, or a host with more memory; `tpuflow.estimate` says without running anything what the simulated device needs."
    )


def available_bytes() -> int | None:
    """Bytes of memory that the host has available; None if it does not say."""
    try:
        found = _AVAILABLE.search(MEMORY_FILE.read_text())
    except OSError:
        return None
    return None if found is None else 1024 * int(found[1])


@functools.cache
def total_bytes() -> int:
    """Bytes of memory of the host, or of this process's control group if that has a lower limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        text = CONTROL_GROUP_FILE.read_text().strip()
    except OSError:
        return physical
    return min(physical, int(text)) if text.isdigit() else physical
