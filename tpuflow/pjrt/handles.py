"""What C holds of ours. A handle is the address of an object's header: words that hold what C may ask of it, the first one its own."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from tpuflow.pjrt.native import Native

WORDS = 12
"""Of a header. Word 0 is the link of the list of destroyed objects."""

OBJECTS: dict[int, Any] = {}
"""Handle -> object, until C destroys it. Reading and writing a dict are atomic, so threads need no lock."""

Header: Any = ctypes.c_uint64 * WORDS


class ApiObject:
    """Something with a header of its own; `fields` are the header's words from 1 on."""

    def __init__(self, *fields: int):
        self.header = Header(0, *fields)
        self.handle = ctypes.addressof(self.header)
        OBJECTS[self.handle] = self

    def destroyed(self, handles: Sequence[int]) -> None:
        """C knows it no more. What only it holds goes with it."""


def _native() -> Native | None:
    try:
        return Native()
    except OSError:
        return None


NATIVE = _native()
"""None on hosts where all entries are Python's: what is destroyed while an exception is on its way then loses the exception."""


def destroy(handles: Iterable[int]) -> None:
    """Forget objects, and free what they hold."""
    for found, own in itertools.groupby(handles, OBJECTS.get):
        gone = list(own)
        for handle in gone:
            OBJECTS.pop(handle, None)
        if found is not None:
            found.destroyed(gone)


def collect() -> None:
    """Forget what C has destroyed since the last time. Every entry that makes something begins with it."""
    if NATIVE is not None:
        destroy(NATIVE.destroyed())
