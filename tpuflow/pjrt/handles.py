"""Handles, by which C refers to our objects. A handle is the address of a header: words with all that C may ask of the object.

An object that stands for several things in C, such as the results of a call, has a header for each, one after the other. Word 0 belongs to
the list of destroyed objects (`native.py`); the others up to `INDEX` are the object's own.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tpuflow.pjrt.native import Native

INDEX, OBJECT, ARRAYS, WORDS = range(12, 16)
"""The number of a header among those of its object; in the first of them, for C (`shim.c`), the addresses of the object and of its list of
arrays; and the number of words of a header."""

HEADER_BYTES = 8 * WORDS

OBJECTS: dict[int, Any] = {}
"""First handle -> object, until C has destroyed all of it. Reading and writing a dict are atomic, so threads need no lock."""

Header: Any = ctypes.c_uint64 * WORDS
_Word = ctypes.c_uint64


class ApiObject:
    """An object that C has a handle of; `fields` are the words of its header from 1 on."""

    def __init__(self, *fields: int):
        self.header = Header(0, *fields)
        self.header[OBJECT] = id(self)
        self.handle = ctypes.addressof(self.header)
        OBJECTS[self.handle] = self

    def drop(self, indices: Sequence[int]) -> Sequence[int]:
        """Drop the arrays of some of its headers; returns those that had one."""
        return ()

    def destroyed(self, indices: Sequence[int], held: Sequence[int]) -> None:
        """Called when C has destroyed some of its headers, after `drop`, which returned `held`; frees what else they hold."""
        OBJECTS.pop(self.handle, None)


def _native() -> Native | None:
    try:
        return Native()
    except OSError:
        return None


NATIVE = _native()
"""The machine code of entries; None on hosts that forbid it, where all entries are in Python. There, destroying an object while a Python
exception propagates loses the exception."""


def place(handle: int) -> tuple[Any, int]:
    """The object of a handle, and the number of the header among the object's."""
    index = _Word.from_address(handle + 8 * INDEX).value
    return OBJECTS[handle - HEADER_BYTES * index], index


def places(handles: Iterable[int]) -> Iterator[tuple[Any, list[int]]]:
    """The objects of handles, each with the numbers of its headers: what follows one another and is of one object, such as the results of a
    call, together."""
    for found, own in itertools.groupby(map(place, handles), lambda at: at[0]):
        yield found, [index for _, index in own]


def destroy(handles: Iterable[int]) -> None:
    """Forget objects, and free what they hold."""
    for found, indices in places(handles):
        found.destroyed(indices, found.drop(indices))


def collect() -> None:
    """Free the objects that C has destroyed since the last call. Every entry that creates an object calls it first."""
    if NATIVE is not None:
        destroy(NATIVE.destroyed())
