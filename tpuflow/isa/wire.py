"""The lowest layer of the binary format: reader and writer of bytes, and the codecs of numbers, words and strings."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from tpuflow.dtypes import BY_CODE, DType
from tpuflow.errors import ProgramFileError

T = TypeVar("T")
INTEGER_BITS = 64

_DOUBLE = struct.Struct("<d")
_EXACT_IN_DOUBLE = 1 << 53
_UNSIGNED_END = 1 << INTEGER_BITS
_SIGNED_END = 1 << (INTEGER_BITS - 1)


class Writer:
    """Bytes under construction, with the forms of the kernels to be written (by their `id`), the numbers of those that are written already
    (by that of the form), and the tables of the form being written (by the type of their rows)."""

    __slots__ = ("depth", "forms", "out", "tables", "written")

    def __init__(self, tables: dict[type, Any] | None = None, forms: Mapping[int, Any] | None = None) -> None:
        self.out = bytearray()
        self.depth = 0
        self.tables = tables or {}
        self.forms = forms or {}
        self.written: dict[int, int] = {}


class Reader:
    """A position in the bytes of one section, with the forms of kernels read so far, the number of instructions of all kernels, and the
    tables of the form being read."""

    __slots__ = ("at", "data", "depth", "forms", "instructions", "tables", "where")

    def __init__(self, data: bytes | memoryview, where: str = "") -> None:
        self.data = data
        self.at = 0
        self.where = where
        self.depth = 0
        self.tables: dict[type, tuple[Any, ...]] = {}
        self.forms: list[Any] = []
        self.instructions = 0

    def fail(self, message: str) -> NoReturn:
        """Raise the error of this place."""
        raise ProgramFileError(f"{self.where}, byte {self.at}: {message}")

    def take(self, count: int, label: str) -> bytes:
        """The next `count` bytes."""
        left = len(self.data) - self.at
        if count > left:
            self.fail(f"{label} needs {count} bytes, found {left}")
        self.at += count
        return bytes(self.data[self.at - count : self.at])

    def finish(self) -> None:
        """Check that nothing is left."""
        if self.at != len(self.data):
            self.fail(f"found {len(self.data) - self.at} bytes after the end of the section's content")


@dataclass(frozen=True, slots=True)
class Codec:
    """How values of one type are written and read."""

    write: Callable[[Writer, Any], None]
    read: Callable[[Reader], Any]


def refuse(label: str, value: object, expected: str) -> NoReturn:
    """Raise the error of a value that has no place in a program file."""
    raise ProgramFileError(f"cannot write the program: {label} is {value!r} ({type(value).__name__}), expected {expected}")


def put_unsigned(out: bytearray, value: int) -> None:
    """Append a varint (`value` already checked)."""
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def get_unsigned(r: Reader) -> int:
    """The varint at the reader's position."""
    data, at = r.data, r.at
    value = shift = 0
    try:
        while (byte := data[at]) > 0x7F:
            value |= (byte & 0x7F) << shift
            shift += 7
            at += 1
            if shift >= INTEGER_BITS:
                r.fail("a number does not fit in 64 bits")
    except IndexError:
        r.fail("the content ends within a number")
    if shift and byte == 0:
        r.fail("a number is not in its shortest form")
    value |= byte << shift
    if value >= _UNSIGNED_END:
        r.fail("a number does not fit in 64 bits")
    r.at = at + 1
    return value


def _integer(label: str, value: object, low: int, high: int) -> int:
    if not hasattr(value, "__index__") or not low <= (number := value.__index__()) < high:  # type: ignore[attr-defined]
        refuse(label, value, f"an integer from {low} to {high - 1}")
    return number


def unsigned_codec(label: str) -> Codec:
    """A non-negative integer: a varint."""

    def write(w: Writer, value: int) -> None:
        put_unsigned(w.out, _integer(label, value, 0, _UNSIGNED_END))

    return Codec(write, get_unsigned)


def signed_codec(label: str) -> Codec:
    """An integer, zigzagged into a varint."""

    def write(w: Writer, value: int) -> None:
        value = _integer(label, value, -_SIGNED_END, _SIGNED_END)
        put_unsigned(w.out, value * 2 if value >= 0 else -value * 2 - 1)

    def read(r: Reader) -> int:
        value = get_unsigned(r)
        return -(value >> 1) - 1 if value & 1 else value >> 1

    return Codec(write, read)


def bool_codec(label: str) -> Codec:
    """A byte 0 or 1."""

    def write(w: Writer, value: bool) -> None:
        if not isinstance(value, bool):
            refuse(label, value, "a bool")
        w.out.append(value)

    def read(r: Reader) -> bool:
        value = get_unsigned(r)
        if value > 1:
            r.fail(f"{label} holds {value}, expected 0 or 1")
        return bool(value)

    return Codec(write, read)


def float_codec(label: str) -> Codec:
    """A double, little-endian."""

    def write(w: Writer, value: float) -> None:
        exact = isinstance(value, float) or (isinstance(value, int) and abs(value) <= _EXACT_IN_DOUBLE)
        if isinstance(value, bool) or not exact:
            refuse(label, value, "a number that a double holds exactly")
        w.out += _DOUBLE.pack(value)

    return Codec(write, lambda r: _DOUBLE.unpack(r.take(_DOUBLE.size, label))[0])


def scalar_codec(label: str) -> Codec:
    """A Python bool, int or float with its type: a byte 0 (bool), 1 (int) or 2 (float), then the value."""
    tags = {bool: 0, int: 1, float: 2}
    forms = (bool_codec(label), signed_codec(label), float_codec(label))

    def write(w: Writer, value: int | float | bool) -> None:
        tag = tags.get(type(value))
        if tag is None:
            refuse(label, value, "a Python int, float or bool")
        w.out.append(tag)
        forms[tag].write(w, value)

    def read(r: Reader) -> int | float | bool:
        tag = get_unsigned(r)
        if tag >= len(forms):
            r.fail(f"{label} has type code {tag}, expected below {len(forms)}")
        return forms[tag].read(r)

    return Codec(write, read)


def bytes_codec(label: str) -> Codec:
    """A length and the bytes."""

    def write(w: Writer, value: bytes) -> None:
        if not isinstance(value, bytes):
            refuse(label, value, "bytes")
        put_unsigned(w.out, len(value))
        w.out += value

    return Codec(write, lambda r: r.take(get_unsigned(r), label))


def string_codec(label: str) -> Codec:
    """A length and UTF-8 text."""
    raw = bytes_codec(label)

    def write(w: Writer, value: str) -> None:
        if not isinstance(value, str):
            refuse(label, value, "a string")
        raw.write(w, value.encode("utf-8", "surrogatepass"))

    def read(r: Reader) -> str:
        try:
            return raw.read(r).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            r.fail(f"{label} is not UTF-8 text")

    return Codec(write, read)


def choice_codec(label: str, codes: Mapping[str, int]) -> Codec:
    """The number of a word."""
    words = {code: word for word, code in codes.items()}
    if len(words) < len(codes):
        raise ValueError(f"{label}: two of the words {', '.join(codes)} have one number")

    return _numbered(label, words, codes.get, "code", f"one of {', '.join(codes)}")


def dtype_codec(label: str) -> Codec:
    """The code of an element type."""

    return _numbered(label, BY_CODE, lambda value: value.code if isinstance(value, DType) else None, "element type code", "a DType")


def _numbered(label: str, values: Mapping[int, T], code_of: Callable[[Any], int | None], kind: str, expected: str) -> Codec:
    """A value of `values`, by its number; `kind` and `expected` describe it in errors."""

    def write(w: Writer, value: T) -> None:
        code = code_of(value)
        if code is None:
            refuse(label, value, expected)
        w.out.append(code)

    def read(r: Reader) -> T:
        code = get_unsigned(r)
        if code not in values:
            r.fail(f"{label} has {kind} {code}, expected one of {', '.join(map(str, values))}")
        return values[code]

    return Codec(write, read)
