"""Memory that is shared with C: the words of argument structs, and strings, arrays and named values that C reads."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Args = Any
"""The argument struct of an entry as words of 8 bytes (a ctypes pointer): word 0 is its size, 1 its extensions, 2 and on its fields."""

Pointer = ctypes.POINTER(ctypes.c_uint64)
INT, BOOL = 0xFFFFFFFF, 0xFF
"""Masks: a C `int`, an enum or a `bool` fills only part of its word, and the rest is whatever was there."""


def words(address: int, count: int) -> Any:
    """The words at an address, to read and write."""
    return (ctypes.c_uint64 * count).from_address(address)


def integers(address: int, count: int) -> tuple[int, ...]:
    """An array of signed 64-bit numbers at an address."""
    return tuple((ctypes.c_int64 * count).from_address(address)) if count else ()


def text_at(address: int, size: int) -> str:
    """A string that the caller owns."""
    return ctypes.string_at(address, size).decode()


class Cells:
    """Memory at a fixed address, valid as long as this object lives."""

    __slots__ = ("address", "size")
    address: int
    size: int

    @property
    def pair(self) -> tuple[int, int]:
        """Address and size."""
        return self.address, self.size


class Text(Cells):
    """A string for C, valid as long as this object lives."""

    __slots__ = ("_memory",)

    def __init__(self, text: str | bytes):
        data = text.encode(errors="backslashreplace") if isinstance(text, str) else text
        self._memory = ctypes.create_string_buffer(data, len(data) + 1)
        self.address, self.size = ctypes.addressof(self._memory), len(data)


class Numbers(Cells):
    """An array of numbers or addresses for C, valid as long as this object lives."""

    __slots__ = ("_memory",)

    def __init__(self, values: Iterable[int], ctype: Any = ctypes.c_int64):
        found = list(values)
        self._memory = (ctype * max(1, len(found)))(*found)
        self.address, self.size = ctypes.addressof(self._memory), len(found)


@functools.lru_cache(4096)
def dimensions(shape: tuple[int, ...]) -> Numbers:
    """A shape as C sees it; the same memory for all buffers of that shape."""
    return Numbers(shape)


class _NamedValue(ctypes.Structure):
    """`PJRT_NamedValue`."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("name", ctypes.c_void_p),
        ("name_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("value_size", ctypes.c_size_t),
    )


_STRING, _INT64, _INT64_LIST, _FLOAT = range(4)


class NamedValues(Cells):
    """`PJRT_NamedValue`s (strings, integers, lists of integers, fp32 numbers) for C, valid as long as this object lives."""

    __slots__ = ("_kept", "_memory")

    def __init__(self, values: Mapping[str, str | int | float | Sequence[int]]):
        self._kept: list[Any] = []
        self._memory = (_NamedValue * max(1, len(values)))(*[self._value(n, v) for n, v in values.items()])
        self.address, self.size = ctypes.addressof(self._memory), len(values)

    def _value(self, name: str, value: Any) -> _NamedValue:
        label = self._keep(Text(name))
        head = (ctypes.sizeof(_NamedValue), None, label.address, label.size)
        if isinstance(value, str):
            text = self._keep(Text(value))
            return _NamedValue(*head, _STRING, text.address, text.size)
        if isinstance(value, float):
            return _NamedValue(*head, _FLOAT, ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value, 1)
        if isinstance(value, int):
            return _NamedValue(*head, _INT64, value & (2**64 - 1), 1)
        numbers = self._keep(Numbers(value))
        return _NamedValue(*head, _INT64_LIST, numbers.address, numbers.size)

    def _keep(self, value: Any) -> Any:
        self._kept.append(value)
        return value
