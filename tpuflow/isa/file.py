"""The .tpx file: a Program as bytes, versioned and checksummed.

A file is a header, a table of sections, and the sections one after the other. All fixed-size numbers are little-endian.

    magic          8 bytes   89 54 50 58 0d 0a 1a 0a
    major, minor   2 x u16   other major and newer minor versions are refused
    sections       u32       rows of the section table
    rows           44 bytes each: name (4 letters), length (u64), SHA-256 of the content
    checksum       32 bytes  SHA-256 of everything above, and so of the whole file

The sections, in this order: CHIP (the chip's row), BUFS (the buffer table), CNST (constants), PORT (inputs, outputs, infeeds,
outfeeds), CODE (blocks and kernels), MESH (the axes of the chips that run it) and, if there is any of it, DBUG: where the chip's numbers
are from, the program's and buffers' names, the kernels' names and scopes, those of collectives with their source lines, and a source
line for every instruction, over one table of strings. The code hash is the SHA-256 of the table rows of all sections but DBUG: names and
sources do not change it. The chip's row is hardware: what is fitted to measured times is a calibration's and in no Program. The same
Program always gives the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import struct
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tpuflow.errors import ProgramError, ProgramFileError, listed
from tpuflow.isa.codec import MAX_INSTRUCTIONS, codec_of, form_codec, record_codec
from tpuflow.isa.collectives import Collective
from tpuflow.isa.kernel_forms import KernelForm
from tpuflow.isa.program import Block, Kernel, Loop, Program, Switch, While, walk
from tpuflow.isa.wire import Codec, Reader, Writer

MAGIC = b"\x89TPX\r\n\x1a\n"
MAJOR, MINOR = 14, 0
SECTIONS = {  # every section with the Program fields that it holds
    "CHIP": ("chip",),
    "BUFS": ("buffers",),
    "CNST": ("constants",),
    "PORT": ("inputs", "outputs", "infeeds", "outfeeds"),
    "CODE": ("code",),
    "MESH": ("mesh",),
}
DEBUG = "DBUG"
MAX_SECTIONS = 64

_HEADER = struct.Struct("<8sHHI")
_ROW = struct.Struct("<4sQ32s")
_DIGEST_BYTES = 32
_HINTS = typing.get_type_hints(Program)


@dataclass(frozen=True, slots=True)
class _KernelDebug:
    """Rows of the string table: a kernel's name, its scope and its source lines (none, or one an instruction)."""

    name: int
    scope: int
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _CollectiveDebug:
    """Rows of the string table: a collective's scope and its source line."""

    scope: int
    where: int


@dataclass(frozen=True, slots=True)
class _Debug:
    """Content of the DBUG section; kernels and collectives in program order, depth first."""

    strings: tuple[str, ...]
    chip_source: int
    name: int
    buffer_names: tuple[int, ...]
    kernels: tuple[_KernelDebug, ...]
    collectives: tuple[_CollectiveDebug, ...]


def save(program: Program, path: str | os.PathLike[str]) -> None:
    """Write a Program to a file, whole or not at all.

    Raises:
      ProgramFileError: the Program holds something that has no place in a file.
      OSError: the file cannot be written.
    """
    target = Path(path)
    data = to_bytes(program)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Program:
    """Read the Program of a file.

    Raises:
      ProgramFileError: the file is cut short, damaged, of another version, or no program file.
      OSError: the file cannot be read.
    """
    return from_bytes(Path(path).read_bytes(), name=os.fspath(path))


def to_bytes(program: Program) -> bytes:
    """The file content of a Program; equal Programs give equal bytes.

    Raises:
      ProgramFileError: the Program holds something that has no place in a file.
    """
    if program.host_lines:
        raise ProgramFileError(
            f"cannot write the program: it calls Python on the host, which has no place in a file, at {listed(program.host_lines)}. "
            "Take jax.debug.print, jax.debug.callback, io_callback and pure_callback out of what is saved."
        )
    sections = [(name, _encode(program, name)) for name in SECTIONS]
    debug = _encode_debug(program)
    if debug:
        sections.append((DEBUG, debug))
    head = _HEADER.pack(MAGIC, MAJOR, MINOR, len(sections)) + b"".join(_row(name, content) for name, content in sections)
    return b"".join((head, hashlib.sha256(head).digest(), *(content for _, content in sections)))


def code_bytes(program: Program) -> int:
    """The size of a Program's file without names, source lines and constants."""
    contents = sum(len(_encode(program, name)) for name in SECTIONS)
    return _HEADER.size + len(SECTIONS) * _ROW.size + _DIGEST_BYTES + contents - sum(len(c.data) for c in program.constants)


def code_hash(program: Program) -> str:
    """SHA-256 (hex) of everything that a Program does: all sections but names and source lines."""
    return hashlib.sha256(b"".join(_row(name, _encode(program, name)) for name in SECTIONS)).hexdigest()


def from_bytes(data: bytes, *, name: str = "") -> Program:
    """The Program of a file's content; `name` says in errors where the bytes are from.

    Raises:
      ProgramFileError: the bytes are cut short, damaged, of another version, or no program file.
    """
    where = name or "program file"
    sections = dict(_sections(data, where))
    fields = {}
    for section, names in SECTIONS.items():
        reader = Reader(sections[section], f"{where}: section {section}")
        fields.update({field: _field_codec(field).read(reader) for field in names})
        reader.finish()
    program = Program(**fields)
    return _decode_debug(program, Reader(sections[DEBUG], f"{where}: section {DEBUG}")) if DEBUG in sections else program


# ---- container


def _row(name: str, content: bytes) -> bytes:
    return _ROW.pack(name.encode(), len(content), hashlib.sha256(content).digest())


def _sections(data: bytes, where: str) -> Iterator[tuple[str, memoryview]]:
    """Name and content of every section, after all checks that need no decoding."""
    rows = _checked_rows(data, where)
    start = _HEADER.size + len(rows) * _ROW.size + _DIGEST_BYTES
    expected = start + sum(length for _, length, _ in rows)
    if len(data) < expected:
        raise ProgramFileError(f"{where}: cut short: found {len(data)} bytes, expected {expected}")
    if len(data) > expected:
        raise ProgramFileError(f"{where}: found {len(data) - expected} bytes after the end of the program ({expected} bytes)")
    at = start
    for (tag, length, digest), name in zip(rows, (*SECTIONS, DEBUG), strict=False):
        content = memoryview(data)[at : at + length]
        if tag != name.encode():
            raise ProgramFileError(f"{where}: found section {tag!r}, expected {name!r}; write the file again with this version")
        if hashlib.sha256(content).digest() != digest:
            raise ProgramFileError(f"{where}: section {name} (bytes {at} to {at + length}) is damaged: its checksum does not match")
        at += length
        yield name, content


def _checked_rows(data: bytes, where: str) -> list[tuple[bytes, int, bytes]]:
    """The section table, after checking magic, version and checksum."""
    if not data:
        raise ProgramFileError(f"{where}: the file is empty")
    if not data.startswith(MAGIC[: len(data)]):
        raise ProgramFileError(
            f"{where}: not a tpuflow program: it starts with {bytes(data[:8])!r}, expected {MAGIC!r}; give a .tpx file as tpuflow saves it"
        )
    if len(data) < _HEADER.size:
        raise ProgramFileError(f"{where}: cut short: found {len(data)} bytes, the header alone has {_HEADER.size}")
    _, major, minor, count = _HEADER.unpack_from(data)
    if major != MAJOR or minor > MINOR:
        raise ProgramFileError(
            f"{where}: written in format {major}.{minor}; this tpuflow reads {MAJOR}.0 to {MAJOR}.{MINOR}. Compile the program again."
        )
    end = _HEADER.size + count * _ROW.size
    if count <= MAX_SECTIONS and len(data) < end + _DIGEST_BYTES:
        raise ProgramFileError(f"{where}: cut short within the section table: found {len(data)} bytes, expected {end + _DIGEST_BYTES}")
    if count > MAX_SECTIONS or hashlib.sha256(data[:end]).digest() != data[end : end + _DIGEST_BYTES]:
        raise ProgramFileError(f"{where}: the header is damaged: its checksum does not match")
    if count not in (len(SECTIONS), len(SECTIONS) + 1):
        raise ProgramFileError(f"{where}: found {count} sections, expected {len(SECTIONS)} or {len(SECTIONS) + 1}")
    return list(_ROW.iter_unpack(data[_HEADER.size : end]))


# ---- sections


def _field_codec(field: str) -> Codec:
    return codec_of(_HINTS[field], f"Program.{field}")


def _encode(program: Program, section: str) -> bytes:
    w = Writer(forms=_forms(program) if "code" in SECTIONS[section] else None)
    for field in SECTIONS[section]:
        _field_codec(field).write(w, getattr(program, field))
    return bytes(w.out)


def _forms(program: Program) -> Mapping[int, KernelForm]:
    try:
        forms = program.forms_by_id()
    except (ProgramError, AttributeError, TypeError) as error:  # something that is no kernel: its codec says what of it is not
        for kernel in program.kernels():
            form_codec().write(Writer(), kernel)
        raise ProgramFileError(f"cannot write the program: {error}") from None
    if (found := sum(len(k.instructions) for k in program.kernels())) > MAX_INSTRUCTIONS:
        raise ProgramFileError(f"cannot write the program: its kernels have {found} instructions, expected at most {MAX_INSTRUCTIONS}.")
    return forms


def debug_fault(program: Program) -> str:
    """What is wrong with names and source lines, which must be absent or complete ("" if nothing)."""
    for number, kernel in enumerate(program.kernels()):
        lines, instructions = len(kernel.sources), len(kernel.instructions)
        if lines not in (0, instructions):
            return f"kernel {number} ({kernel.name!r}) has {lines} source lines for {instructions} instructions"
    if len(program.buffer_names) not in (0, len(program.buffers)):
        return f"the program has {len(program.buffer_names)} buffer names for {len(program.buffers)} buffers"
    return ""


def _encode_debug(program: Program) -> bytes:
    if fault := debug_fault(program):
        raise ProgramFileError(f"cannot write the program: {fault}")
    named = program.name or program.chip.source or program.buffer_names
    collectives = [block for _, block in walk(program.code) if isinstance(block, Collective)]
    if not named and not any(k.title or k.sources for k in program.kernels()) and not any(c.scope or c.where for c in collectives):
        return b""
    strings: dict[str, int] = {}

    def row(text: str) -> int:
        return strings.setdefault(text, len(strings))

    source, name, buffer_names = row(program.chip.source), row(program.name), tuple(map(row, program.buffer_names))
    kernels = tuple(_KernelDebug(row(k.name), row(k.scope), tuple(map(row, k.sources))) for k in program.kernels())
    moved = tuple(_CollectiveDebug(row(c.scope), row(c.where)) for c in collectives)
    w = Writer()
    record_codec(_Debug).write(w, _Debug(tuple(strings), source, name, buffer_names, kernels, moved))
    return bytes(w.out)


def _decode_debug(program: Program, r: Reader) -> Program:
    debug: _Debug = record_codec(_Debug).read(r)
    r.finish()
    kernels = sum(1 for _ in program.kernels())
    rows = [debug.chip_source, debug.name, *debug.buffer_names, *(i for k in debug.kernels for i in (k.name, k.scope, *k.sources))]
    rows += [i for c in debug.collectives for i in (c.scope, c.where)]
    collectives = sum(isinstance(block, Collective) for _, block in walk(program.code))
    if len(debug.collectives) != collectives:
        r.fail(f"it names {len(debug.collectives)} collectives, the program has {collectives}")
    if len(debug.kernels) != kernels:
        r.fail(f"it names {len(debug.kernels)} kernels, the program has {kernels}")
    if not all(0 <= row < len(debug.strings) for row in rows):
        r.fail(f"a name is not in its table of {len(debug.strings)} strings")
    left, moved = iter(debug.kernels), iter(debug.collectives)

    def named(block: Block) -> Block:
        if isinstance(block, Collective):
            found = next(moved)
            return replace(block, scope=debug.strings[found.scope], where=debug.strings[found.where])
        if not isinstance(block, Kernel):
            return _with_children(block, named)
        entry = next(left)
        lines = tuple(debug.strings[i] for i in entry.sources)
        return replace(block, name=debug.strings[entry.name], scope=debug.strings[entry.scope], sources=lines)

    program = replace(
        program,
        chip=replace(program.chip, source=debug.strings[debug.chip_source]),
        code=tuple(map(named, program.code)),
        name=debug.strings[debug.name],
        buffer_names=tuple(debug.strings[i] for i in debug.buffer_names),
    )
    if fault := debug_fault(program):
        r.fail(fault)
    return program


def _with_children(block: Block, change: Callable[[Block], Block]) -> Block:
    """The block with every directly nested block changed, in program order."""
    match block:
        case Loop():
            return replace(block, body=tuple(map(change, block.body)))
        case While():
            return replace(block, condition=tuple(map(change, block.condition)), body=tuple(map(change, block.body)))
        case Switch():
            return replace(block, branches=tuple(tuple(map(change, branch)) for branch in block.branches))
    return block
