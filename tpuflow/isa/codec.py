"""How records and instructions become bytes: one codec a type, built from dataclass fields and instruction field kinds.

Integers are varints of seven bits a byte, low bits first, in their shortest form; signed ones are zigzagged first (0, -1, 1, -2, ...).
A string or `bytes` is its length and its content (UTF-8), a tuple of any length its length and its items, a dataclass its fields in
order, a union the number of the alternative and its content. Within a kernel, tiles and windows are written once each, in order of
first use, ahead of the instructions, which hold their row numbers.

Reading trusts nothing: every length is held against the bytes that are left before anything is built from it, every code against
its table, and every fault is a `ProgramFileError` that says where.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from tpuflow.dtypes import BY_CODE, DType
from tpuflow.errors import ProgramFileError
from tpuflow.isa import dma, matrix, vector
from tpuflow.isa.instruction import INSTRUCTIONS, MAX_RANK, RATES, SPACES, FieldKind, Instruction, Tile, Window
from tpuflow.isa.program import GRID_KINDS, Kernel

FAMILIES = (vector, matrix, dma)  # importing them declares the instructions
MAX_DEPTH = 64  # nested blocks
MAX_ARRAY_RANK = 32
INTEGER_BITS = 64

CHOICES = {"Tile.space": SPACES, "Tile.rate": RATES, "GridAxis.kind": GRID_KINDS}  # string fields that hold one word of a list
LIMITS = {  # most items of a tuple field, where it is not the file's length that limits them
    "Tile.axes": MAX_RANK,
    "Window.axes": MAX_RANK,
    "WindowAxis.grid": MAX_ARRAY_RANK,
    "Kernel.grid": MAX_ARRAY_RANK,
    "Buffer.shape": MAX_ARRAY_RANK,
    "Port.shape": MAX_ARRAY_RANK,
}

_DOUBLE = struct.Struct("<d")
_EXACT_IN_DOUBLE = 1 << 53
_UNSIGNED_END = 1 << INTEGER_BITS
_SIGNED_END = 1 << (INTEGER_BITS - 1)


class Table:
    """The rows of a kernel's tile or window table while it is written; what encodes alike is one row."""

    __slots__ = ("_numbers", "rows", "_encode")

    def __init__(self, encode: Callable[[Any], Any]) -> None:
        self.rows: dict[Any, int] = {}
        self._encode = encode
        self._numbers: dict[int, int] = {}  # by identity; the kernel keeps the objects alive

    def number(self, item: Any) -> int:
        """The row number of a tile or window, entered at first use."""
        known = self._numbers.get(id(item))
        if known is None:
            known = self.rows.setdefault(self._encode(item), len(self.rows))
            self._numbers[id(item)] = known
        return known


class Writer:
    """Bytes under construction, with the tables of the kernel being written."""

    __slots__ = ("out", "depth", "tables")

    def __init__(self, tables: dict[type, Table] | None = None) -> None:
        self.out = bytearray()
        self.depth = 0
        self.tables = tables or {}


class Reader:
    """A position in the bytes of one section, with the tables of the kernel being read."""

    __slots__ = ("data", "at", "where", "depth", "tables")

    def __init__(self, data: bytes | memoryview, where: str = "") -> None:
        self.data = data
        self.at = 0
        self.where = where
        self.depth = 0
        self.tables: dict[type, tuple[Any, ...]] = {}

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


# ---- numbers, words and strings


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


def _unsigned_codec(label: str) -> Codec:
    def write(w: Writer, value: int) -> None:
        put_unsigned(w.out, _integer(label, value, 0, _UNSIGNED_END))

    return Codec(write, get_unsigned)


def _signed_codec(label: str) -> Codec:
    def write(w: Writer, value: int) -> None:
        value = _integer(label, value, -_SIGNED_END, _SIGNED_END)
        put_unsigned(w.out, value * 2 if value >= 0 else -value * 2 - 1)

    def read(r: Reader) -> int:
        value = get_unsigned(r)
        return -(value >> 1) - 1 if value & 1 else value >> 1

    return Codec(write, read)


def _bool_codec(label: str) -> Codec:
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


def _float_codec(label: str) -> Codec:
    def write(w: Writer, value: float) -> None:
        exact = isinstance(value, float) or (isinstance(value, int) and abs(value) <= _EXACT_IN_DOUBLE)
        if isinstance(value, bool) or not exact:
            refuse(label, value, "a number that a double holds exactly")
        w.out += _DOUBLE.pack(value)

    return Codec(write, lambda r: _DOUBLE.unpack(r.take(_DOUBLE.size, label))[0])


def _scalar_codec(label: str) -> Codec:
    """A Python bool, int or float with its type: a byte 0 (bool), 1 (int) or 2 (float), then the value."""
    tags = {bool: 0, int: 1, float: 2}
    forms = (_bool_codec(label), _signed_codec(label), _float_codec(label))

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


def _bytes_codec(label: str) -> Codec:
    def write(w: Writer, value: bytes) -> None:
        if not isinstance(value, bytes):
            refuse(label, value, "bytes")
        put_unsigned(w.out, len(value))
        w.out += value

    return Codec(write, lambda r: r.take(get_unsigned(r), label))


def _string_codec(label: str) -> Codec:
    if label in CHOICES:
        return _choice_codec(label, CHOICES[label])
    raw = _bytes_codec(label)

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


def _choice_codec(label: str, words: tuple[str, ...]) -> Codec:
    codes = {word: code for code, word in enumerate(words)}

    def write(w: Writer, value: str) -> None:
        if value not in codes:
            refuse(label, value, f"one of {', '.join(words)}")
        w.out.append(codes[value])

    def read(r: Reader) -> str:
        code = get_unsigned(r)
        if code >= len(words):
            r.fail(f"{label} has code {code}, expected below {len(words)}")
        return words[code]

    return Codec(write, read)


def _dtype_codec(label: str) -> Codec:
    def write(w: Writer, value: DType) -> None:
        if not isinstance(value, DType):
            refuse(label, value, "a DType")
        w.out.append(value.code)

    def read(r: Reader) -> DType:
        code = get_unsigned(r)
        if code not in BY_CODE:
            r.fail(f"{label} has element type code {code}, expected one of {', '.join(map(str, BY_CODE))}")
        return BY_CODE[code]

    return Codec(write, read)


# ---- tuples, options, records, unions


def _sequence_codec(label: str, item: Codec, *, least: int = 0, most: int | None = None) -> Codec:
    most = LIMITS.get(label, most)

    def write(w: Writer, value: tuple[Any, ...]) -> None:
        if not isinstance(value, tuple) or len(value) < least or (most is not None and len(value) > most):
            refuse(label, value, f"a tuple of at least {least}" + (f" and at most {most}" if most is not None else ""))
        put_unsigned(w.out, len(value))
        for entry in value:
            item.write(w, entry)

    def read(r: Reader) -> tuple[Any, ...]:
        count = get_unsigned(r)
        left = len(r.data) - r.at  # an item takes at least a byte
        if count > (left if most is None else min(left, most)):
            r.fail(f"{label} has {count} items, expected at most {left if most is None else most} with {left} bytes left")
        if count < least:
            r.fail(f"{label} is empty, expected at least {least} item")
        read_item = item.read
        return tuple([read_item(r) for _ in range(count)])

    return Codec(write, read)


def _fixed_codec(label: str, items: tuple[Codec, ...]) -> Codec:
    def write(w: Writer, value: tuple[Any, ...]) -> None:
        if not isinstance(value, tuple) or len(value) != len(items):
            refuse(label, value, f"a tuple of {len(items)}")
        for item, entry in zip(items, value, strict=True):
            item.write(w, entry)

    return Codec(write, lambda r: tuple([item.read(r) for item in items]))


def _optional_codec(label: str, item: Codec) -> Codec:
    present = _bool_codec(label)

    def write(w: Writer, value: Any) -> None:
        present.write(w, value is not None)
        if value is not None:
            item.write(w, value)

    return Codec(write, lambda r: item.read(r) if present.read(r) else None)


def _fields_codec(cls: type, fields: tuple[tuple[str, Codec], ...]) -> Codec:
    reads = tuple(codec.read for _, codec in fields)
    names = tuple(name for name, _ in fields)

    def write(w: Writer, value: Any) -> None:
        if type(value) is not cls:
            refuse(f"a place for a {cls.__name__}", value, f"a {cls.__name__}")
        for name, codec in fields:
            codec.write(w, getattr(value, name))

    def read(r: Reader) -> Any:
        return cls(**dict(zip(names, [read_field(r) for read_field in reads], strict=True)))

    return Codec(write, read)


@functools.cache
def record_codec(cls: type) -> Codec:
    """The codec of a dataclass: its fields in order, by their type hints; debug fields (`compare=False`) are left out."""
    hints = typing.get_type_hints(cls)
    fields = [f.name for f in dataclasses.fields(cls) if f.compare]
    return _fields_codec(cls, tuple((name, codec_of(hints[name], f"{cls.__name__}.{name}")) for name in fields))


def _row_codec(cls: type) -> Codec:
    """A tile or window by its row number in the kernel's table."""

    def write(w: Writer, value: Any) -> None:
        put_unsigned(w.out, w.tables[cls].number(value))

    def read(r: Reader) -> Any:
        number, rows = get_unsigned(r), r.tables.get(cls, ())
        if number >= len(rows):
            r.fail(f"{cls.__name__.lower()} {number} is not one of the kernel's {len(rows)}")
        return rows[number]

    return Codec(write, read)


def _kernel_codec() -> Codec:
    """A kernel: its tile table, its window table (whose rows use the tiles), then its fields."""
    fields, tile, window = record_codec(Kernel), record_codec(Tile), record_codec(Window)

    def write(w: Writer, value: Kernel) -> None:
        tables: dict[type, Table] = {}
        tables[Tile] = Table(lambda item: _encoded(tile, item, tables))
        tables[Window] = Table(lambda item: _encoded(window, item, tables))
        content = _encoded(fields, value, tables)
        for table in tables.values():
            put_unsigned(w.out, len(table.rows))
            for row in table.rows:
                w.out += row
        w.out += content

    def read(r: Reader) -> Kernel:
        r.tables = {}
        r.tables[Tile] = _sequence_codec("the tile table", tile).read(r)
        r.tables[Window] = _sequence_codec("the window table", window).read(r)
        return fields.read(r)

    return Codec(write, read)


def _encoded(codec: Codec, value: Any, tables: dict[type, Table]) -> bytes:
    w = Writer(tables)
    codec.write(w, value)
    return bytes(w.out)


def _union_codec(label: str, members: tuple[type, ...]) -> Codec:
    """One of several records, by number. The only codec that can contain itself, so the one that counts depth."""
    codecs = functools.cache(lambda: tuple(codec_of(member, label) for member in members))  # late: members may lead back here

    def write(w: Writer, value: Any) -> None:
        if type(value) not in members:
            refuse(label, value, f"one of {', '.join(m.__name__ for m in members)}")
        if w.depth >= MAX_DEPTH:
            refuse(label, "...", f"at most {MAX_DEPTH} nested blocks")
        tag = members.index(type(value))
        w.out.append(tag)
        w.depth += 1
        codecs()[tag].write(w, value)
        w.depth -= 1

    def read(r: Reader) -> Any:
        tag = get_unsigned(r)
        if tag >= len(members):
            r.fail(f"{label} has block code {tag}, expected below {len(members)}")
        if r.depth >= MAX_DEPTH:
            r.fail(f"{label} nests blocks more than {MAX_DEPTH} deep")
        r.depth += 1
        value = codecs()[tag].read(r)
        r.depth -= 1
        return value

    return Codec(write, read)


# ---- instructions


KINDS: dict[str, Callable[[str, FieldKind], Codec]] = {
    "tile": lambda label, kind: codec_of(Tile, label),
    "tiles": lambda label, kind: _sequence_codec(label, codec_of(Tile, label), least=1),
    "window": lambda label, kind: codec_of(Window, label),
    "choice": lambda label, kind: _choice_codec(label, kind.choices),
    "axes": lambda label, kind: _sequence_codec(label, _unsigned_codec(label), most=MAX_RANK),
    "number": lambda label, kind: _unsigned_codec(label),
    "flag": lambda label, kind: _bool_codec(label),
    "immediate": lambda label, kind: _scalar_codec(label),
}


def _instruction_codec() -> Codec:
    """The opcode, then the fields by their declared kinds."""
    codecs = {
        opcode: _fields_codec(cls, tuple((n, KINDS[k.name](f"{cls.mnemonic}.{n}", k)) for n, k in cls.kinds.items()))
        for opcode, cls in INSTRUCTIONS.items()
    }

    def write(w: Writer, value: Instruction) -> None:
        codec = codecs.get(getattr(value, "opcode", -1))
        if codec is None:
            refuse("an instruction", value, "a declared instruction")
        put_unsigned(w.out, value.opcode)
        codec.write(w, value)

    def read(r: Reader) -> Instruction:
        opcode = get_unsigned(r)
        if opcode not in codecs:
            r.fail(f"no instruction has opcode {opcode:#x}")
        return codecs[opcode].read(r)

    return Codec(write, read)


# ---- the choice of a codec

_SCALARS: dict[Any, Callable[[str], Codec]] = {
    int: _signed_codec,
    bool: _bool_codec,
    float: _float_codec,
    str: _string_codec,
    bytes: _bytes_codec,
    DType: _dtype_codec,
    int | float | bool: _scalar_codec,
}
_SPECIAL: dict[Any, Callable[[], Codec]] = {
    Tile: lambda: _row_codec(Tile),
    Window: lambda: _row_codec(Window),
    Kernel: functools.cache(_kernel_codec),
    Instruction: functools.cache(_instruction_codec),
}


def codec_of(hint: Any, label: str) -> Codec:
    """The codec of a type hint; `label` names the field in errors."""
    if hint in _SCALARS:
        return _SCALARS[hint](label)
    if hint in _SPECIAL:
        return _SPECIAL[hint]()
    args = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and args[-1] is Ellipsis:
        return _sequence_codec(label, codec_of(args[0], label))
    if typing.get_origin(hint) is tuple:
        return _fixed_codec(label, tuple(codec_of(a, label) for a in args))
    if isinstance(hint, types.UnionType) and types.NoneType in args:
        (item,) = (a for a in args if a is not types.NoneType)
        return _optional_codec(label, codec_of(item, label))
    if isinstance(hint, types.UnionType):
        return _union_codec(label, args)
    return record_codec(hint)
