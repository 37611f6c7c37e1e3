"""The host's memory: when it is not enough for a launch, an error of ours that says what was asked for and what there is."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpuflow.errors import HostMemoryError
from tpuflow.isa.program import Program

MEMORY_FILE = Path("/proc/meminfo")
CONTROL_GROUP_FILE = Path("/sys/fs/cgroup/memory.max")
_ASKED = re.compile(r"allocating (\d+) bytes")
_AVAILABLE = re.compile(r"MemAvailable:\s*(\d+) kB")


@contextmanager
def host_memory(program: Program) -> Iterator[None]:
    """Turn the host's refusal of memory into an error of ours.

    Raises:
      HostMemoryError: the host has not as much memory as the launch asks for.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # NumPy's, and XLA's
        if not isinstance(error, MemoryError) and not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        raise _error(program, str(error)) from error


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
    """What the host could still give; None if it does not say."""
    try:
        found = _AVAILABLE.search(MEMORY_FILE.read_text())
    except OSError:
        return None
    return None if found is None else 1024 * int(found[1])


@functools.cache
def total_bytes() -> int:
    """All that the host has, or that its control group leaves to this process."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        text = CONTROL_GROUP_FILE.read_text().strip()
    except OSError:
        return physical
    return min(physical, int(text)) if text.isdigit() else physical
