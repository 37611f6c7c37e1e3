"""Protobuf's wire format, as far as XLA's messages have to be read: their fields by number, in the order they come in."""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The number and the value of each field: an integer, or the bytes of a string, a message, a packed list, a number of fixed size.

    Raises:
      ValueError: a field is of none of these kinds.
    """
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 == _VARINT:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if tag & 7 == _BYTES:
            size, at = _varint(message, at)
        elif tag & 7 in _FIXED_BYTES:
            size = _FIXED_BYTES[tag & 7]
        else:
            raise ValueError(f"byte {at}: field {tag >> 3} is of kind {tag & 7}; expected 0, 1, 2 or 5.")
        yield tag >> 3, message[at : at + size]
        at += size


def packed(values: bytes) -> list[int]:
    """The integers of a packed list."""
    found, at = [], 0
    while at < len(values):
        value, at = _varint(values, at)
        found.append(value)
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number, seven bits a byte, the low ones first, and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
