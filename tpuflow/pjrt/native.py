"""Entries in machine code, a few instructions each, for those that jaxlib calls where Python must not run.

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

BEGIN = bytes.fromhex("f30f1efa")  # endbr64
DONE = bytes.fromhex("31c0c3")  # xor eax, eax; ret: no error

NOTHING = BEGIN + DONE

CALL_BACK = BEGIN + bytes.fromhex(
    "488b4718"  # mov rax, [args + 3 words]: the function
    "488b7720"  # mov rsi, [args + 4 words]: its second argument
    "31ff"  # xor edi, edi: its first, no error
    "4883ec08 ffd0 4883c408"  # sub rsp, 8; call rax; add rsp, 8
) + DONE  # fmt: skip
"""Call a callback that waits for an event: at once, since every event is ready."""

_PUSH = (
    "488b4710"  # mov rax, [args + 2 words]: the object
    "4885c0 741a"  # test rax, rax; jz done
    "48b9 {head}"  # mov rcx, head of the list
    "4889c2"  # mov rdx, rax
    "488b01"  # again: mov rax, [rcx]
    "488902"  # mov [rdx], rax: the object's first word is the next on the list
    "f0480fb111"  # lock cmpxchg [rcx], rdx
    "75f3"  # jne again
)
_LIST = (
    "31c9"  # xor ecx, ecx: how many there are so far
    "4885ff 7412"  # again: test header, header; jz done
    "4839d1 740d"  # cmp rcx, room; je done
    "48897cce08"  # mov [handles + rcx + 1 words], header
    "488b3f"  # mov header, [header]: the next on the list
    "48ffc1 ebe9"  # inc rcx; jmp again
    "48890e"  # done: mov [handles], rcx
    "4889f8 c3"  # mov rax, header; ret
)
"""Follow a list from a header (rdi): write the number of handles and the handles to rsi, at most rdx of them; return where it continues."""
_TAKE = "48b9 {head} 31ff 488739" + _LIST  # mov rcx, head; xor edi, edi; xchg [rcx], rdi
"""The same from the head of the list, which is emptied atomically."""


def copy(fields: Sequence[int]) -> bytes:
    """Machine code that copies these words of the header in argument 2 into the arguments from 3 on."""
    moves = (bytes((0x48, 0x8B, 0x48, 8 * field, 0x48, 0x89, 0x4F, 8 * (3 + place))) for place, field in enumerate(fields))
    return BEGIN + bytes.fromhex("488b4710") + b"".join(moves) + DONE


def constant(value: int) -> bytes:
    """Machine code that writes a number of 32 bits into argument 3."""
    return BEGIN + bytes.fromhex("48c74718") + value.to_bytes(4, "little") + DONE


ROOM = 63
"""Handles that are listed at once."""

_Handles: Any = ctypes.c_uint64 * (1 + ROOM)
_Lister = ctypes.PYFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64)


class Native:
    """Memory with the code of entries, and the list of what was destroyed.

    Raises:
      OSError: the host is no x86-64, or does not let a process make code.
    """

    def __init__(self) -> None:
        if sys.platform == "win32" or platform.machine().lower() not in ("x86_64", "amd64"):
            raise OSError(f"no machine code for {sys.platform} on {platform.machine()}")
        self._memory = mmap.mmap(-1, 1 << 14, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._used = 8  # the head of the list
        self._head = ctypes.c_uint64.from_address(self._base)
        head = self._base.to_bytes(8, "little").hex()
        self.destroy = self.add(BEGIN + bytes.fromhex(_PUSH.format(head=head)) + DONE)
        self._take = _Lister(self.add(BEGIN + bytes.fromhex(_TAKE.format(head=head))))
        self._list = _Lister(self.add(BEGIN + bytes.fromhex(_LIST)))

    def add(self, code: bytes) -> int:
        """Copy code into executable memory, and return its address."""
        start = (self._used + 15) // 16 * 16
        self._used = start + len(code)
        assert self._used <= len(self._memory)
        self._memory[start : self._used] = code
        return self._base + start

    def destroyed(self) -> list[int]:
        """Empty the list of destroyed objects, and return their handles."""
        header, found, listing = self._head.value, [], self._take
        while header:
            handles = _Handles()
            header, listing = listing(header, handles, ROOM), self._list
            found += handles[1 : 1 + handles[0]]
        return found
