"""What becomes of the host's memory that results took: the C library keeps it for the next ones.

The device computes on the thread that calls, so glibc's malloc takes its results from the process's heap, gives their memory back to the
system as soon as they are dropped, and gets it anew, zeroed page by page, for the next: a result of 8 MB takes 2048 page faults a call, up
to 3 ms. JAX's CPU backend allocates on threads of its own, whose heaps keep what they have.
"""

from __future__ import annotations

import ctypes
import os

KEPT_BYTES = 2**28
"""How much free memory at the end of the heap stays with the process."""
MAPPED_BYTES = 2**25
"""From this size on memory is mapped for each array by itself, and given back with it: the most that glibc has as a limit."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h."""
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""The environment variables by which a user chooses: then nothing is set here."""


def keep_freed_memory() -> None:
    """Let malloc keep up to `KEPT_BYTES` that are free, where it is glibc's and the user has not chosen otherwise."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in SETTINGS):
        return
    mallopt(_MMAP_THRESHOLD, MAPPED_BYTES)
    mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
