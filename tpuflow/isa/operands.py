"""The text of a kernel's tiles, windows and instructions, read."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

from tpuflow.dtypes import BY_NAME
from tpuflow.errors import did_you_mean
from tpuflow.isa.bounds import Bound
from tpuflow.isa.contraction import SlidingAxis
from tpuflow.isa.cursor import WORD, Cursor
from tpuflow.isa.disassembler import POSITIONAL
from tpuflow.isa.instruction import (
    BY_MNEMONIC,
    MAX_RANK,
    QUEUE_CODES,
    QUEUES,
    RATES,
    SPACES,
    FieldKind,
    Instruction,
    Tile,
    TileAxis,
    Window,
    WindowAxis,
)

_NAME = re.compile(r"%[tw]\w+")
_TILE = re.compile(r"%t\w+")
_WINDOW = re.compile(r"%w\w+")


class Names:
    """The tiles and windows of a kernel by their names."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def define(self, cursor: Cursor) -> None:
        """Read a definition line."""
        start = cursor.place()
        name = cursor.match(_NAME, "%t or %w and a number")
        if name in self._known:
            cursor.fail("a name that is not defined above", start)
        cursor.expect("=")
        self._known[name] = _tile(cursor) if name.startswith("%t") else _window(cursor, self)
        cursor.end()

    def tile(self, cursor: Cursor) -> Tile:
        """A tile's name."""
        return self._get(cursor, _TILE, "a tile")

    def tiles(self, cursor: Cursor) -> tuple[Tile, ...]:
        """Tiles in parentheses, at least one."""
        start = cursor.place()
        return cursor.items(functools.partial(self.tile, cursor), "(", ")") or cursor.fail("at least one tile", start)

    def window(self, cursor: Cursor) -> Window:
        """A window's name."""
        return self._get(cursor, _WINDOW, "a window")

    def _get(self, cursor: Cursor, pattern: re.Pattern[str], what: str) -> Any:
        start = cursor.place()
        name = cursor.match(pattern, f"{what} of this kernel")
        return self._known[name] if name in self._known else cursor.fail(f"{what} of this kernel", start)


def _tile(cursor: Cursor) -> Tile:
    space = cursor.one_of(SPACES)
    cursor.expect("[")
    address = cursor.integer()
    cursor.expect("]")
    dtype = BY_NAME[cursor.one_of(tuple(BY_NAME))]
    axes = cursor.items(functools.partial(_tile_axis, cursor), "[", "]", MAX_RANK)
    cursor.expect("x")
    return Tile(space, address, dtype, axes, cursor.integer(), cursor.one_of(RATES))


def _tile_axis(cursor: Cursor) -> TileAxis:
    size = cursor.integer()
    if not cursor.accept("@"):
        return TileAxis(size)
    cursor.expect("g")
    grid = cursor.integer()
    cursor.expect("/")
    return TileAxis(size, grid, cursor.integer())


def _window(cursor: Cursor, names: Names) -> Window:
    buffer, tile = cursor.buffer(), names.tile(cursor)
    axes = cursor.items(functools.partial(_window_axis, cursor, names), "[", "]", MAX_RANK)
    cursor.expect("fill")
    return Window(buffer, tile, axes, cursor.scalar())


def _window_axis(cursor: Cursor, names: Names) -> WindowAxis:
    extent = cursor.integer()
    cursor.expect(":")
    pitch = cursor.integer()
    cursor.expect("at")
    dilated = cursor.accept("(")
    axis = _position(cursor, names, WindowAxis(extent, pitch, step=0))
    if not dilated:
        return axis
    cursor.expect(")")
    cursor.expect("/")
    return dataclasses.replace(axis, dilation=cursor.integer())


def _position(cursor: Cursor, names: Names, axis: WindowAxis) -> WindowAxis:
    """The axis with its position, a sum in this order: origin, grid terms, a register, the step."""
    latest = -1
    while True:
        start = cursor.place()
        field, value = _term(cursor, names)
        order = _TERMS.index(field)
        if order < latest or (order == latest and field != "grid"):
            cursor.fail("terms in the order origin, grid, register, step", start)
        latest = order
        axis = dataclasses.replace(axis, **{field: (*axis.grid, value) if field == "grid" else value})
        if not cursor.accept("+"):
            return axis


_TERMS = ("origin", "grid", "register", "step")


def _term(cursor: Cursor, names: Names) -> tuple[str, Any]:
    if cursor.text.startswith("%", cursor.place()):
        return "register", names.tile(cursor)
    if cursor.accept_word("j"):
        return "step", 1
    number = cursor.integer()
    if not cursor.accept("*"):
        return "origin", number
    if cursor.accept_word("j"):
        return "step", number
    cursor.expect("g")
    return "grid", (cursor.integer(), number)


# ---- instructions


def read_sliding(cursor: Cursor) -> SlidingAxis:
    """1 stride 2 label 5 dilation 1."""
    axis = cursor.integer()
    stride, label, dilation = map(cursor.integer_after, ("stride", "label", "dilation"))
    return SlidingAxis(axis, label, stride, dilation)


def read_bound(cursor: Cursor) -> Bound:
    """8 at (0 + 2*x4 + 1*x5)/1."""
    extent = cursor.integer()
    cursor.expect("at")
    origin, terms = cursor.integer_after("("), []
    while cursor.accept("+"):
        factor = cursor.integer()
        cursor.expect("*")
        terms.append((cursor.integer_after("x"), factor))
    cursor.expect(")")
    return Bound(extent, tuple(terms), origin, cursor.integer_after("/"))


OPERANDS: dict[str, Callable[[Cursor, Names], Any]] = {
    "tile": lambda cursor, names: names.tile(cursor),
    "tiles": lambda cursor, names: names.tiles(cursor),
    "window": lambda cursor, names: names.window(cursor),
    "axes": lambda cursor, names: cursor.items(cursor.natural, "[", "]", MAX_RANK),
    "pairs": lambda cursor, names: cursor.items(functools.partial(read_sliding, cursor), "[", "]", MAX_RANK),
    "bounds": lambda cursor, names: cursor.items(functools.partial(read_bound, cursor), "[", "]", MAX_RANK),
    "number": lambda cursor, names: cursor.natural(),
    "flag": lambda cursor, names: cursor.flag(),
    "immediate": lambda cursor, names: cursor.scalar(),
}


@functools.cache
def _parts(cls: type[Instruction]) -> tuple[tuple[tuple[str, FieldKind], ...], tuple[tuple[str, FieldKind], ...]]:
    """The fields of an instruction that are words of a list, and the others; a field that names the queue is a word, but not written."""
    fields = tuple(cls.kinds.items())
    return tuple(f for f in fields if f[1].name == "choice"), tuple(f for f in fields if f[1].name != "choice")


def read_instruction(cursor: Cursor, names: Names) -> Instruction:
    """An instruction, up to its comment."""
    start = cursor.place()
    queue = cursor.one_of(QUEUES)
    cursor.expect(".")
    cls = _class(cursor)
    choices, operands = _parts(cls)
    values: dict[str, Any] = {name: queue if kind.choices == QUEUE_CODES else cursor.one_of(kind.choices) for name, kind in choices}
    for number, (name, kind) in enumerate(operands):
        if number:
            cursor.expect(",")
        if kind.name not in POSITIONAL:
            cursor.expect(name)
            cursor.expect("=")
        values[name] = OPERANDS[kind.name](cursor, names)
    instruction = cls(**values)
    if instruction.queue != queue:
        cursor.fail(f"{instruction.queue}.{cls.mnemonic} for these operands", start)
    return instruction


def _class(cursor: Cursor) -> type[Instruction]:
    start = cursor.place()
    mnemonic = cursor.match(WORD, "a mnemonic")
    if mnemonic in BY_MNEMONIC:
        return BY_MNEMONIC[mnemonic]
    cursor.fail(f"a mnemonic.{did_you_mean(mnemonic, BY_MNEMONIC)}", start)
