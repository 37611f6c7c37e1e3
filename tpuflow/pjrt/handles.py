"""Handles, by which C refers to our objects. A handle is the address of a header: words with all that C may ask of the object.

An object that stands for several things in C, such as the results of a call, has a header for each, one after the other. Word 0 belongs to
the list of destroyed objects (`native.py`); the others up to `INDEX` are the object's own.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from tpuflow.pjrt.native import Native

INDEX, OBJECT, ARRAYS, WORDS = range(12, 16)
"""The number of a header among those of its object; in the first of them, for C (`shim.c`), the addresses of the object and of its list of
arrays; and the number of words of a header."""

HEADER_BYTES = 8 * WORDS

OBJECTS: dict[int, Any] = {}
"""Handle -> object, until C destroys it. Reading and writing a dict are atomic, so threads need no lock."""

Header: Any = ctypes.c_uint64 * WORDS


class ApiObject:
    """An object that C has a handle of; `fields` are the words of its header from 1 on."""

    def __init__(self, *fields: int):
        self.header = Header(0, *fields)
        self.header[OBJECT] = id(self)
        self.handle = ctypes.addressof(self.header)
        OBJECTS[self.handle] = self

    def indices(self, handles: Iterable[int]) -> list[int]:
        """The numbers of headers."""
        return [0 for _ in handles]

    def drop(self, indices: Sequence[int]) -> list[int]:
        """Drop the arrays of some of its headers; returns those that had one."""
        return []

    def destroyed(self, indices: Sequence[int], held: Sequence[int]) -> None:
        """Called when C has destroyed some of its headers, after `drop`, which returned `held`; frees what else they hold."""


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
            indices = found.indices(gone)
            found.destroyed(indices, found.drop(indices))


def collect() -> None:
    """Free the objects that C has destroyed since the last call. Every entry that creates an object calls it first."""
    if NATIVE is not None:
        destroy(NATIVE.destroyed())
