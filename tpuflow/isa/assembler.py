"""The text of a Program (`tpuflow.isa.disassembler` says how it reads) back to the Program.

Spaces within a line, empty lines and whole-line comments are free, and so are comments on lines that have no debug information;
everything else is as the disassembler writes it. Every error says line, column, what was found and what was expected.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from tpuflow.chips.chip import Chip
from tpuflow.dtypes import BY_NAME
from tpuflow.errors import ProgramFileError
from tpuflow.isa.codec import LIMITS, MAX_DEPTH
from tpuflow.isa.collectives import KIND_CODES, REDUCERS, Await, Collective, MeshAxis, Position
from tpuflow.isa.cursor import Cursor, Lines
from tpuflow.isa.disassembler import PORT_SECTIONS, UNBUFFERED, values_data
from tpuflow.isa.file import MAJOR, MINOR
from tpuflow.isa.instruction import Instruction
from tpuflow.isa.operands import Names, read_instruction
from tpuflow.isa.program import (
    BUFFER_SPACES,
    GRID_KINDS,
    SECTIONS,
    Block,
    Buffer,
    CallHost,
    Constant,
    Copy,
    GridAxis,
    Infeed,
    Kernel,
    Loop,
    Outfeed,
    Port,
    Program,
    Switch,
    While,
)

T = TypeVar("T")

_VERSION = re.compile(r"[0-9]{1,5}\.[0-9]{1,5}")
_DEFINITION = re.compile(r"%")
_HEX = re.compile(r"(?:[0-9a-f]{2})+")
_SECTIONS = ("chip", "mesh", "buffers", "constants", *PORT_SECTIONS, "code")


def assemble(text: str, *, name: str = "") -> Program:
    """The Program of a text; `name` says in errors where the text is from.

    Raises:
      ProgramFileError: the text is not that of a Program.
    """
    lines = Lines(text, name or "program text")
    program_name = _header(lines)
    chip = _chip(lines)
    mesh = _section(lines, "mesh", _mesh_axis)
    numbers = itertools.count()
    buffers = _section(lines, "buffers", lambda cursor: _buffer(cursor, next(numbers)))
    constants = _section(lines, "constants", functools.partial(_constant, lines=lines))
    ports: dict[str, Any] = {section: _section(lines, section, _port) for section in PORT_SECTIONS}
    code = _blocks(lines, 1) if lines.heading("code") else ()
    lines.finish(f"the end of the text, or one of the sections {', '.join(_SECTIONS)} in this order")
    names = _all_or_none([comment for _, comment in buffers], f"{lines.name}: buffers")
    return Program(chip, tuple(b for b, _ in buffers), constants, code=code, mesh=mesh, name=program_name, buffer_names=names, **ports)


def _header(lines: Lines) -> str:
    cursor = lines.heading("tpx")
    if cursor is None:
        lines.fail(f"'tpx {MAJOR}.{MINOR}'")
    start = cursor.place()
    major, minor = map(int, cursor.match(_VERSION, "a version").split("."))
    if major != MAJOR or minor > MINOR:
        cursor.fail(f"a version from {MAJOR}.0 to {MAJOR}.{MINOR}", start)
    return cursor.end() or ""


def _section(lines: Lines, name: str, item: Callable[[Cursor], T]) -> tuple[T, ...]:
    found: list[T] = []
    if lines.heading(name):
        while cursor := lines.take(1):
            found.append(item(cursor))
    return tuple(found)


def _all_or_none(comments: list[str | None], where: str) -> tuple[str, ...]:
    names = tuple(comment for comment in comments if comment is not None)
    if len(names) not in (0, len(comments)):
        raise ProgramFileError(f"{where}: found {len(names)} comments on {len(comments)} lines, expected one on every line or none")
    return names


# ---- chip, buffers, constants, ports

_FACTS: dict[Any, Callable[[Cursor], Any]] = {str: Cursor.string, int: Cursor.integer, float: Cursor.number}


def _chip(lines: Lines) -> Chip:
    if not lines.heading("chip"):
        lines.fail("'chip'")
    values = {}
    optional = {f.name for f in dataclasses.fields(Chip) if f.default is not dataclasses.MISSING}
    for name, hint in typing.get_type_hints(Chip).items():
        cursor = lines.heading(name, 1)
        if cursor is None:
            if name in optional:
                continue
            lines.fail(f"the chip's {name!r}")
        values[name] = _FACTS[hint](cursor)
        cursor.end()
    return Chip(**values)


def _mesh_axis(cursor: Cursor) -> MeshAxis:
    axis = MeshAxis(cursor.string(), cursor.integer(), cursor.accept_word("joined"))
    cursor.end()
    return axis


def _buffer(cursor: Cursor, number: int) -> tuple[Buffer, str | None]:
    start = cursor.place()
    if cursor.buffer() != number:
        cursor.fail(f"'b{number}': buffers are numbered from 0 without gaps", start)
    dtype, shape = cursor.array_type()
    cursor.expect("at")
    space = next(filter(cursor.accept_word, BUFFER_SPACES[1:]), None)
    if space is None:
        return Buffer(dtype, shape, cursor.integer()), cursor.end()
    cursor.expect("[")
    address = cursor.integer()
    cursor.expect("]")
    return Buffer(dtype, shape, address, space), cursor.end()


def _constant(cursor: Cursor, lines: Lines) -> Constant:
    buffer = cursor.buffer()
    cursor.expect("=")
    data = _hex_lines(lines) if cursor.accept_word("hex") else _values(cursor)
    cursor.end()
    return Constant(buffer, data)


def _hex_lines(lines: Lines) -> bytes:
    rows = []
    while cursor := lines.take(2):
        rows.append(bytes.fromhex(cursor.match(_HEX, "hexadecimal bytes")))
        cursor.end()
    return b"".join(rows)


_VALUES: dict[str, Callable[[Cursor], Any]] = {
    "float": Cursor.number, "int": Cursor.integer, "uint": Cursor.integer, "pred": Cursor.flag,
}  # fmt: skip


def _values(cursor: Cursor) -> bytes:
    dtype = BY_NAME[cursor.one_of(tuple(BY_NAME))]
    start = cursor.place()
    values = cursor.items(functools.partial(_VALUES[dtype.computed.kind], cursor))
    try:
        return values_data(dtype, list(values))
    except OverflowError:
        cursor.fail(f"values that fit in {dtype}", start)


def _port(cursor: Cursor) -> Port:
    name = cursor.string()
    dtype, shape = cursor.array_type()
    buffer = cursor.buffer()
    donated, weak = cursor.accept_word("donated"), cursor.accept_word("weak")
    key = _key(cursor)
    cut = _tuples(cursor, "cut", LIMITS["Port.cut"])
    cursor.end()
    return Port(name, dtype, shape, buffer, donated, weak, key, cut)


def _tuples(cursor: Cursor, word: str, most: int | None = None) -> tuple[tuple[int, ...], ...]:
    """`word=[(0, 1), ()]`; empty if the word does not come here."""
    if not cursor.accept_word(word):
        return ()
    cursor.expect("=")
    return cursor.items(lambda: cursor.items(cursor.integer, "(", ")", most), "[", "]", most)


def _key(cursor: Cursor) -> str:
    if not cursor.accept_word("key"):
        return ""
    cursor.expect("=")
    return cursor.string()


# ---- blocks


def _blocks(lines: Lines, depth: int) -> tuple[Block, ...]:
    found: list[Block] = []
    while cursor := lines.take(depth):
        if depth > 2 * MAX_DEPTH:
            cursor.fail(f"at most {MAX_DEPTH} nested blocks")
        found.append(_BLOCKS[cursor.one_of(tuple(_BLOCKS))](cursor, lines, depth))
    return tuple(found)


def _nested(lines: Lines, depth: int, name: str) -> tuple[Block, ...]:
    cursor = lines.heading(name, depth)
    if cursor is None:
        lines.fail(f"{name!r} at column {2 * depth + 1}")
    cursor.end()
    return _blocks(lines, depth + 1)


def _numbers(cursor: Cursor, *names: str) -> list[int]:
    """Values of `name=b3`, or `port=3`, in this order; then the end of the line."""
    values = _values_of(cursor, *names)
    cursor.end()
    return values


def _values_of(cursor: Cursor, *names: str) -> list[int]:
    values = []
    for name in names:
        cursor.expect(name)
        cursor.expect("=")
        values.append(cursor.integer() if name in UNBUFFERED else cursor.buffer())
    return values


def _loop(cursor: Cursor, lines: Lines, depth: int) -> Loop:
    (trips,) = _numbers(cursor, "trips")
    return Loop(trips, _nested(lines, depth + 1, "body"))


def _while(cursor: Cursor, lines: Lines, depth: int) -> While:
    (predicate,) = _numbers(cursor, "predicate")
    return While(_nested(lines, depth + 1, "condition"), predicate, _nested(lines, depth + 1, "body"))


def _switch(cursor: Cursor, lines: Lines, depth: int) -> Switch:
    (index,) = _numbers(cursor, "index")
    branches: list[tuple[Block, ...]] = []
    while lines.heading(f"branch{len(branches)}", depth + 1):
        branches.append(_blocks(lines, depth + 2))
    return Switch(index, tuple(branches))


def _infeed(cursor: Cursor, lines: Lines, depth: int) -> Infeed:
    return Infeed(*_numbers(cursor, "port", "buffer"))


def _outfeed(cursor: Cursor, lines: Lines, depth: int) -> Outfeed:
    return Outfeed(*_numbers(cursor, "port", "buffer"))


def _position(cursor: Cursor, lines: Lines, depth: int) -> Position:
    return Position(*_numbers(cursor, "axis", "buffer"))


def _collective(cursor: Cursor, lines: Lines, depth: int) -> Collective:
    kind, reducer = cursor.one_of(tuple(KIND_CODES)), cursor.one_of(tuple(REDUCERS))
    cursor.expect("axes")
    cursor.expect("=")
    axes = cursor.items(cursor.integer, "[", "]", LIMITS["Collective.axes"])
    source, target, semaphore = _values_of(cursor, "source", "target", "semaphore")
    pairs = _tuples(cursor, "pairs")
    wrong = next((p for p in pairs if len(p) != 2), None)
    if wrong is not None:
        cursor.fail(f"pairs of two numbers, not {wrong}")
    scope = cursor.string() if cursor.accept_word("scope") else ""
    ends = tuple((pair[0], pair[1]) for pair in pairs)
    return Collective(kind, reducer, axes, source, target, semaphore, ends, scope, cursor.end() or "")


def _await(cursor: Cursor, lines: Lines, depth: int) -> Await:
    return Await(*_numbers(cursor, "semaphore"))


def _copy(cursor: Cursor, lines: Lines, depth: int) -> Copy:
    return Copy(*_numbers(cursor, "source", "target", "semaphore", "index"))


def _call_host(cursor: Cursor, lines: Lines, depth: int) -> CallHost:
    (function,) = _values_of(cursor, "function")
    ends = []
    for name in ("sources", "targets"):
        cursor.expect(name)
        cursor.expect("=")
        ends.append(cursor.items(cursor.buffer, "[", "]"))
    cursor.end()
    return CallHost(function, *ends)


# ---- kernels


def _kernel(cursor: Cursor, lines: Lines, depth: int) -> Kernel:
    where = f"{lines.name}:{cursor.line}: instructions of this kernel"
    name = cursor.end() or ""
    scope = _scope(lines, depth + 1)
    grid = _list_line(lines, depth + 1, "grid", _grid_axis)
    semaphores = _list_line(lines, depth + 1, "semaphores", Cursor.integer)
    names = Names()
    while definition := lines.take(depth + 1, _DEFINITION):
        names.define(definition)
    sections = {section: _instructions(lines, depth + 1, section, names) for section in SECTIONS}
    code = {section: tuple(instruction for instruction, _ in content) for section, content in sections.items()}
    sources = _all_or_none([comment for content in sections.values() for _, comment in content], where)
    return Kernel(grid, semaphores, **code, name=name, scope=scope, sources=sources)


def _scope(lines: Lines, depth: int) -> str:
    cursor = lines.heading("scope", depth)
    if cursor is None:
        return ""
    scope = cursor.string()
    cursor.end()
    return scope


def _list_line(lines: Lines, depth: int, word: str, item: Callable[[Cursor], T]) -> tuple[T, ...]:
    cursor = lines.heading(word, depth)
    if cursor is None:
        return ()
    values = cursor.items(functools.partial(item, cursor), most=LIMITS.get(f"Kernel.{word}"))
    cursor.end()
    return values


def _grid_axis(cursor: Cursor) -> GridAxis:
    kind = cursor.one_of(GRID_KINDS)
    return GridAxis(cursor.integer(), kind)


def _instructions(lines: Lines, depth: int, section: str, names: Names) -> list[tuple[Instruction, str | None]]:
    heading = lines.heading(section, depth)
    if heading is None:
        return []
    heading.end()
    found = []
    while cursor := lines.take(depth + 1):
        found.append((read_instruction(cursor, names), cursor.end()))
    return found


_BLOCKS: dict[str, Callable[[Cursor, Lines, int], Block]] = {
    "kernel": _kernel, "loop": _loop, "while": _while, "switch": _switch, "infeed": _infeed, "outfeed": _outfeed,
    "position": _position, "collective": _collective, "await": _await, "copy": _copy, "callhost": _call_host,
}  # fmt: skip
