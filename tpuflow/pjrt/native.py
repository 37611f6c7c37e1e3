"""Entries in machine code, for those that jaxlib calls where Python must not run.

jaxlib destroys buffers while a Python exception propagates (a callback would swallow it) and while the interpreter shuts down (a callback
would abort the process), and it reads a buffer's type while holding a lock that a thread with the GIL may be waiting for (a callback would
deadlock). Therefore all that C reads of an object is in its header (`handles.py`), from which these entries copy it, and destroying an
object only links it into a list, which the next entry in Python frees.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from collections.abc import Sequence
from typing import Any

from tpuflow.pjrt.machine_code import MACHINES

ROOM = 63
"""Handles that are listed at once."""
ALIGNMENT = 16

_Handles: Any = ctypes.c_uint64 * (1 + ROOM)
_Lister = ctypes.PYFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64)


class Native:
    """The host's machine code, and the list of what was destroyed, whose head is at the address `head`.

    Raises:
      OSError: there is none for the host, or it does not let a process make code.
    """

    def __init__(self) -> None:
        machine = platform.machine().lower()
        if sys.platform == "win32" or machine not in MACHINES:
            raise OSError(f"no machine code for {sys.platform} on {machine}")
        self.code = MACHINES[machine]
        self._memory: list[mmap.mmap] = []
        self._head = ctypes.c_uint64(0)
        self.head = head = ctypes.addressof(self._head)
        self.destroy, take, listing = self.load((self.code.push(head), self.code.take(head), self.code.listing))
        self._take, self._list = _Lister(take), _Lister(listing)

    def load(self, pieces: Sequence[bytes]) -> list[int]:
        """Copy code into memory that may then be executed, and no longer written; return where each piece begins.

        Raises:
          OSError: the host does not let a process make code.
        """
        padded = [piece + bytes(-len(piece) % ALIGNMENT) for piece in pieces]
        code = b"".join(padded)
        memory = mmap.mmap(-1, len(code), flags=mmap.MAP_PRIVATE | mmap.MAP_ANON, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        memory[:] = code
        self._memory.append(memory)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        _allow_execution(base, len(code))
        return [base + sum(map(len, padded[:i])) for i in range(len(padded))]

    def destroyed(self) -> list[int]:
        """Empty the list of destroyed objects, and return their handles."""
        header, found, listing = self._head.value, [], self._take
        while header:
            handles = _Handles()
            header, listing = listing(header, handles, ROOM), self._list
            found += handles[1 : 1 + handles[0]]
        return found


def _allow_execution(address: int, size: int) -> None:
    c = ctypes.CDLL(None, use_errno=True)
    if c.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "mprotect")
    # Where data and instructions have caches of their own, what was written as data is made known as instructions.
    if sys.platform == "darwin":
        c.sys_icache_invalidate(ctypes.c_void_p(address), ctypes.c_size_t(size))
    elif platform.machine().lower() == "aarch64":
        ctypes.CDLL("libgcc_s.so.1").__clear_cache(ctypes.c_void_p(address), ctypes.c_void_p(address + size))
