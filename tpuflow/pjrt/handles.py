"""Handles, by which C refers to our objects. A handle is the address of an object's header: words with all that C may ask of the object.

Word 0 belongs to the list of destroyed objects (`native.py`).
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from tpuflow.pjrt.native import Native

WORDS = 12
"""The number of words of a header."""

OBJECTS: dict[int, Any] = {}
"""Handle -> object, until C destroys it. Reading and writing a dict are atomic, so threads need no lock."""

ARRAYS: dict[int, Any] = {}
"""Handle -> array, of every buffer that is not deleted, donated or destroyed. A complex array is two planes, f32[2, *shape], as Programs
take and return them (`ComplexType.port`)."""

Header: Any = ctypes.c_uint64 * WORDS


class ApiObject:
    """An object that C has a handle of; `fields` are the words of its header from 1 on."""

    def __init__(self, *fields: int):
        self.header = Header(0, *fields)
        self.handle = ctypes.addressof(self.header)
        OBJECTS[self.handle] = self

    def destroyed(self, handles: Sequence[int], held: Sequence[int]) -> None:
        """Called when C has destroyed the object, or those of its handles, and the arrays of those that `held` one have been dropped; frees
        what else they hold."""


def _native() -> Native | None:
    try:
        return Native()
    except OSError:
        return None


NATIVE = _native()
"""The machine code of entries; None on hosts that forbid it, where all entries are in Python. There, destroying an object while a Python
exception propagates loses the exception."""


def destroy(handles: Iterable[int]) -> None:
    """Forget objects, and free what they hold; what follows one another and is of one object, such as a call's results, together."""
    for found, own in itertools.groupby(handles, OBJECTS.get):
        if found is not None:
            gone = list(own)
            for handle in gone:
                OBJECTS.pop(handle, None)
            found.destroyed(gone, dropped(gone))


def dropped(handles: Iterable[int]) -> list[int]:
    """Drop the arrays of buffers; returns which of them had one."""
    drop = ARRAYS.pop
    return [handle for handle in handles if drop(handle, None) is not None]


def collect() -> None:
    """Free the objects that C has destroyed since the last call. Every entry that creates an object calls it first."""
    if NATIVE is not None:
        destroy(NATIVE.destroyed())
