"""Host memory: its size, and the error that says what a launch asked for and what there was when an allocation fails."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from tpuflow.errors import HostMemoryError
from tpuflow.isa.program import Program

MEMORY_FILE = Path("/proc/meminfo")
CONTROL_GROUP_FILE = Path("/sys/fs/cgroup/memory.max")
_ASKED = re.compile(r"allocating (\d+) bytes")
_AVAILABLE = re.compile(r"MemAvailable:\s*(\d+) kB")


def refuse_memory(program: Program, error: BaseException) -> None:
    """Say what a launch's error, NumPy's or XLA's, means for the host's memory; nothing if it is about anything else.

    Raises:
      HostMemoryError: the host has not as much memory as the launch asks for.
    """
    text = str(error)
    if not isinstance(error, MemoryError) and not text.startswith("RESOURCE_EXHAUSTED"):
        return
    asked, there = _ASKED.search(text), available_bytes()
    what = f"asked for {int(asked[1]):,} bytes at once" if asked else f"was refused memory ({text.splitlines()[0]})"
    has = "" if there is None else f"; the host has {there:,} bytes available"
    held = sum(b.bytes for b in program.buffers)
    raise HostMemoryError(
        f"host out of memory: the program {program.name or '(no name)'!r} {what}{has}. Its buffers are {held:,} bytes in all. Use a "
        "smaller batch, or a host with more memory; `tpuflow.estimate` says without running anything what the simulated device needs."
    ) from error


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
