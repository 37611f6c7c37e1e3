"""Reading a text line by line, word by word, with errors that say line, column, what was found and what was expected."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection
from typing import NoReturn, TypeVar

from tpuflow.dtypes import BY_NAME, DType
from tpuflow.errors import ProgramFileError
from tpuflow.isa.codec import LIMITS
from tpuflow.isa.wire import INTEGER_BITS

T = TypeVar("T")
INDENT = 2
_LONGEST_SHOWN = 60
WORD = re.compile(r"[A-Za-z_]\w*")

_INTEGER = re.compile(r"-?(?:0x[0-9a-f]{1,16}|[0-9]{1,20})(?![\w.])")
_FLOAT = re.compile(r"nan:[0-9a-f]{16}|nan|-?inf|-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?")
_STRING = re.compile(r'"[^"]*"')
_ESCAPE = re.compile(r"\\u\{([0-9a-f]{1,6})\}")
_TOKEN = re.compile(r'"[^"]*"?|-?[%\w.]+|[^ ]')
_BLANK = re.compile(r"\s*(?:;.*)?")


def _shortened(word: str) -> str:
    return repr(word if len(word) <= _LONGEST_SHOWN else word[:_LONGEST_SHOWN] + "...")


class Cursor:
    """A position in a line; every method skips spaces first."""

    __slots__ = ("at", "line", "name", "text")

    def __init__(self, text: str, line: int, name: str) -> None:
        self.text = text
        self.at = 0
        self.line = line
        self.name = name

    def fail(self, expected: str, at: int | None = None) -> NoReturn:
        """Raise the error of this place, or of place `at` of the line."""
        self._skip()
        at = self.at if at is None else at
        found = _TOKEN.match(self.text, at)
        shown = _shortened(found[0]) if found and not found[0].startswith(";") else "the end of the line"
        raise ProgramFileError(f"{self.name}:{self.line}:{at + 1}: found {shown}, expected {expected}")

    def match(self, pattern: re.Pattern[str], expected: str) -> str:
        """The text of a pattern, which must come here."""
        self._skip()
        found = pattern.match(self.text, self.at)
        if found is None:
            self.fail(expected)
        self.at = found.end()
        return found[0]

    def accept(self, literal: str) -> bool:
        """Step over a piece of punctuation if it comes here."""
        self._skip()
        if not self.text.startswith(literal, self.at):
            return False
        self.at += len(literal)
        return True

    def expect(self, literal: str) -> None:
        """Step over a piece of punctuation or a word, which must come here."""
        if not self.accept(literal):
            self.fail(repr(literal))

    def accept_word(self, word: str) -> bool:
        """Step over a whole word if it comes here."""
        self._skip()
        found = WORD.match(self.text, self.at)
        if found is None or found[0] != word:
            return False
        self.at = found.end()
        return True

    def one_of(self, words: Collection[str]) -> str:
        """One word of a list."""
        start = self.place()
        word = self.match(WORD, f"one of {', '.join(words)}")
        if word not in words:
            self.fail(f"one of {', '.join(words)}", start)
        return word

    def place(self) -> int:
        """Where the next word starts."""
        self._skip()
        return self.at

    def integer(self) -> int:
        """A decimal (leading zeros or not) or hexadecimal integer of at most 64 bits."""
        start = self.place()
        digits = self.match(_INTEGER, "an integer")
        value = int(digits, 16 if "x" in digits else 10)
        if not -(1 << (INTEGER_BITS - 1)) <= value < 1 << INTEGER_BITS:
            self.fail("an integer of at most 64 bits", start)
        return value

    def integer_after(self, literal: str) -> int:
        """An integer behind a piece of punctuation or a word."""
        self.expect(literal)
        return self.integer()

    def natural(self) -> int:
        """A non-negative integer."""
        start = self.place()
        value = self.integer()
        return value if value >= 0 else self.fail("a non-negative integer", start)

    def number(self) -> float:
        """A float."""
        text = self.match(_FLOAT, "a number")
        return struct.unpack(">d", bytes.fromhex(text[4:]))[0] if text.startswith("nan:") else float(text)

    def flag(self) -> bool:
        """`true` or `false`."""
        return self.one_of(("true", "false")) == "true"

    def scalar(self) -> int | float | bool:
        """A number with its type."""
        self._skip()
        if self.text.startswith(("true", "false"), self.at):
            return self.flag()
        return self.integer() if _INTEGER.match(self.text, self.at) else self.number()

    def string(self) -> str:
        """A quoted string."""
        return self._unescape(self.match(_STRING, "a string in double quotes")[1:-1])

    def items(self, item: Callable[[], T], open_: str = "", close: str = "", most: int | None = None) -> tuple[T, ...]:
        """Items between commas; between brackets there may be none."""
        if open_:
            self.expect(open_)
        if close and self.accept(close):
            return ()
        found = [item()]
        while self.accept(","):
            found.append(item())
        if close:
            self.expect(close)
        if most is not None and len(found) > most:
            self.fail(f"at most {most} items before this place, not {len(found)}")
        return tuple(found)

    def buffer(self) -> int:
        """The number of a buffer: b3."""
        self.expect("b")
        return self.integer()

    def array_type(self) -> tuple[DType, tuple[int, ...]]:
        """An element type and a shape."""
        dtype = BY_NAME[self.one_of(tuple(BY_NAME))]
        return dtype, self.items(self.integer, "[", "]", LIMITS["Buffer.shape"])

    def end(self) -> str | None:
        """The end of the line: its comment, or None if it has none."""
        self._skip()
        if self.at == len(self.text):
            return None
        self.expect(";")
        self.at += self.text.startswith(" ", self.at)
        return self._unescape(self.text[self.at :])

    def _skip(self) -> None:
        text, at = self.text, self.at
        while text.startswith(" ", at):
            at += 1
        self.at = at

    def _unescape(self, text: str) -> str:
        return _ESCAPE.sub(self._character, text) if "\\" in text else text

    def _character(self, found: re.Match[str]) -> str:
        code = int(found[1], 16)
        return chr(code) if code <= 0x10FFFF else self.fail(f"a character code up to 10ffff, not {found[1]}")


class Lines:
    """The lines of a text in order, with their indentation."""

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self._lines = [(n, line.rstrip()) for n, line in enumerate(text.split("\n"), 1) if not _BLANK.fullmatch(line)]
        self._next = 0

    def take(self, depth: int, start: re.Pattern[str] | None = None) -> Cursor | None:
        """The next line if it lies `depth` levels deep and starts so; None if not, or if it lies further left or there is none."""
        if self._next == len(self._lines):
            return None
        cursor = self._here()
        indent = cursor.place()
        if indent < depth * INDENT or (start is not None and not start.match(cursor.text, indent)):
            return None
        if indent > depth * INDENT:
            cursor.fail(f"this line to start at column {depth * INDENT + 1}")
        self._next += 1
        return cursor

    def heading(self, word: str, depth: int = 0) -> Cursor | None:
        """The next line, after its first word, if it is at that depth and the word is this one."""
        cursor = self.take(depth, re.compile(rf"{word}(?!\w)"))
        if cursor is not None:
            cursor.expect(word)
        return cursor

    def fail(self, expected: str) -> NoReturn:
        """Raise the error of the next line, or of the end of the text."""
        if self._next < len(self._lines):
            self._here().fail(expected)
        raise ProgramFileError(f"{self.name}: found the end of the text, expected {expected}")

    def finish(self, expected: str) -> None:
        """Check that no line is left."""
        if self._next < len(self._lines):
            self.fail(expected)

    def _here(self) -> Cursor:
        number, line = self._lines[self._next]
        return Cursor(line, number, self.name)
