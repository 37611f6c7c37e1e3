"""The binary encoding of records and instructions: one codec for each type, built from dataclass fields and instruction field kinds.

Integers are varints of seven bits a byte, low bits first, in their shortest form; signed ones are zigzagged first (0, -1, 1, -2, ...).
A string or `bytes` is its length and its content (UTF-8), a tuple of any length its length and its items, a dataclass its fields in
order, a word of a list its number there, an element type its code, a union the number of the alternative and its content. An
instruction is its opcode and its fields. A kernel is the number of its form, the form itself where it is new, and the buffers that the form
numbers from 0 in order of first use: kernels of equal layers are written once. Within a form, tiles and windows are written once each, in
order of first use, ahead of the instructions, which hold their row numbers.

Reading trusts nothing: every length is held against the bytes that are left before anything is built from it, every code against
its table, and every fault is a `ProgramFileError` that says where.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from typing import Any

from tpuflow.dtypes import DType
from tpuflow.isa import dma, matrix, vector
from tpuflow.isa.bounds import Bound
from tpuflow.isa.collectives import KIND_CODES, REDUCERS
from tpuflow.isa.contraction import SlidingAxis
from tpuflow.isa.instruction import INSTRUCTIONS, MAX_RANK, RATES, SPACES, FieldKind, Instruction, Tile, Window
from tpuflow.isa.program import BUFFER_SPACES, GRID_KINDS, Kernel
from tpuflow.isa.wire import (
    Codec,
    Reader,
    Writer,
    bool_codec,
    bytes_codec,
    choice_codec,
    dtype_codec,
    float_codec,
    get_unsigned,
    put_unsigned,
    refuse,
    scalar_codec,
    signed_codec,
    string_codec,
    unsigned_codec,
)

FAMILIES = (vector, matrix, dma)  # every module that declares instructions
DECLARED = tuple(sorted(INSTRUCTIONS.values(), key=lambda cls: cls.opcode))
MAX_DEPTH = 32  # nested blocks; XLA takes seconds to compile loops nested twice as deep
MAX_ARRAY_RANK = 32
MAX_INSTRUCTIONS = 2**22
"""Of all kernels of a program together, many times as many as any of the examples has: a file of a few bytes a kernel could otherwise ask
for any number of them."""

CHOICES = {
    label: {word: code for code, word in enumerate(words)}
    for label, words in {"Tile.space": SPACES, "Tile.rate": RATES, "GridAxis.kind": GRID_KINDS, "Buffer.space": BUFFER_SPACES}.items()
} | {"Collective.kind": KIND_CODES, "Collective.reducer": REDUCERS}
"""String fields that hold one word of a list."""
LIMITS = {  # most items of a tuple field, where it is not the file's length that limits them
    "Tile.axes": MAX_RANK,
    "Window.axes": MAX_RANK,
    "WindowAxis.grid": MAX_ARRAY_RANK,
    "Kernel.grid": MAX_ARRAY_RANK,
    "Buffer.shape": MAX_ARRAY_RANK,
    "Port.shape": MAX_ARRAY_RANK,
    "Port.cut": MAX_ARRAY_RANK,
    "Program.mesh": MAX_RANK,
    "Collective.axes": MAX_RANK,
}


class Table:
    """The rows of a form's tile or window table while it is written. Items with the same encoding share a row."""

    __slots__ = ("_encode", "_numbers", "rows")

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
    present = bool_codec(label)

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
    """A kernel: the number of its form, the form if that is the next number, its buffers."""
    form, buffers = form_codec(), _sequence_codec("the buffers of a kernel", signed_codec("a buffer"))

    def write(w: Writer, value: Kernel) -> None:
        known = w.forms[id(value)]
        new = known.number not in w.written
        put_unsigned(w.out, w.written.setdefault(known.number, len(w.written)))
        if new:
            form.write(w, value.on({buffer: n for n, buffer in enumerate(known.buffers)}))
        buffers.write(w, known.buffers)

    def read(r: Reader) -> Kernel:
        number = get_unsigned(r)
        if number > len(r.forms):
            r.fail(f"a kernel is of form {number}, expected at most {len(r.forms)}, the next one")
        if number == len(r.forms):
            kernel = form.read(r)
            r.forms.append((kernel, {w.buffer for i in kernel.instructions for _, w in i.windows()}))
        kernel, used = r.forms[number]
        named = buffers.read(r)
        if used != set(range(len(named))):
            r.fail(f"a kernel has {len(named)} buffers, its form uses numbers {sorted(used)}")
        r.instructions += len(kernel.instructions)
        if r.instructions > MAX_INSTRUCTIONS:
            r.fail(f"the kernels have more than {MAX_INSTRUCTIONS} instructions")
        return kernel.on(dict(enumerate(named)))

    return Codec(write, read)


@functools.cache
def form_codec() -> Codec:
    """A kernel on buffers that are numbered from 0: its tile table, its window table (whose rows use the tiles), then its fields."""
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
    "choice": lambda label, kind: choice_codec(label, kind.choices),
    "axes": lambda label, kind: _sequence_codec(label, unsigned_codec(label), most=MAX_RANK),
    "pairs": lambda label, kind: _sequence_codec(label, codec_of(SlidingAxis, label), most=MAX_RANK),
    "bounds": lambda label, kind: _sequence_codec(label, codec_of(Bound, label), most=MAX_RANK),
    "number": lambda label, kind: unsigned_codec(label),
    "flag": lambda label, kind: bool_codec(label),
    "immediate": lambda label, kind: scalar_codec(label),
}


def _instruction_codec() -> Codec:
    """The opcode, then the fields by their declared kinds."""
    codecs = {
        cls.opcode: _fields_codec(cls, tuple((n, KINDS[k.name](f"{cls.mnemonic}.{n}", k)) for n, k in cls.kinds.items()))
        for cls in DECLARED
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
    int: signed_codec,
    bool: bool_codec,
    float: float_codec,
    str: lambda label: choice_codec(label, CHOICES[label]) if label in CHOICES else string_codec(label),
    bytes: bytes_codec,
    DType: dtype_codec,
    int | float | bool: scalar_codec,
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
