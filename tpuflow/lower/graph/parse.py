"""The text of a graph, read: what `lower/graph/text.py` writes, from which the same graph comes."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from tpuflow.errors import GraphError, ProgramFileError
from tpuflow.isa.bounds import Bound
from tpuflow.isa.contraction import Contraction
from tpuflow.isa.cursor import WORD, Cursor
from tpuflow.isa.operands import read_bound, read_sliding
from tpuflow.lower.graph.accesses import Access, AccessAxis
from tpuflow.lower.graph.graph import Graph, Node, TensorType, Value
from tpuflow.lower.graph.kinds import Kind
from tpuflow.lower.graph.tiling import TiledAxis, Tiling
from tpuflow.lower.graph.verify import verify
from tpuflow.lower.graph.view import ViewAxis

_REMARK = re.compile(r"\s+#(?: (?P<source>[^\[]*?))?(?:\s*\[(?P<scope>.*)\])?$")
_VALUE = re.compile(r"%\d+")
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
_NAME = re.compile(r"[^(]*")
_CHECKSUM = re.compile(r"crc32:[0-9a-f]{8}")


def parse(text: str, name: str = "graph", constants: Mapping[str, np.ndarray] = MappingProxyType({})) -> Graph:
    """The graph of a text, verified.

    `constants` are the arrays that the text shows by a checksum only ("crc32:..." -> array). Blank lines are passed over. What is not in
    the text (bits of NaNs, names of values within) is not in the graph.

    Raises:
      GraphError: the text is not one of a graph (name, line, column, what was found and expected), or the graph breaks a rule.
    """
    reader = _Reader(text, name, constants)
    try:
        graph = reader.graph("graph")
        reader.finish()
    except ProgramFileError as error:
        raise GraphError(str(error)) from None
    return verify(graph)


class _Reader:
    """The lines of a text, and the values that they have named so far."""

    def __init__(self, text: str, name: str, constants: Mapping[str, np.ndarray]) -> None:
        self.name, self.constants = name, constants
        self.lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        self.values: dict[str, Value] = {}

    def take(self) -> Cursor:
        """The next line."""
        if not self.lines:
            raise ProgramFileError(f"{self.name}: found the end of the text, expected a node, 'return' or '}}'")
        number, line = self.lines.pop(0)
        return Cursor(line, number, self.name)

    def starts(self, word: str) -> bool:
        """Whether the next line starts so."""
        return bool(self.lines) and self.lines[0][1].lstrip().startswith(word)

    def finish(self) -> None:
        """No line is left."""
        if self.lines:
            self.take().fail("the end of the text")

    # --- graphs and nodes

    def graph(self, keyword: str) -> Graph:
        """A graph or a region, from its header to its closing brace."""
        head = self.take()
        head.expect(keyword)
        name = head.match(_NAME, "a name").strip()
        declared = head.items(lambda: self.declared(head), "(", ")")
        head.expect("{")
        _end(head)
        nodes: list[Node] = []
        while not self.starts("return"):
            nodes.append(self.node())
        last = self.take()
        last.expect("return")
        outputs = () if last.place() == len(last.text) else last.items(lambda: (self.value(last), _quoted(last)))
        _end(last)
        self.close()
        ins, outs = (tuple(n for _, n in pairs) for pairs in (declared, outputs))
        values, results = (tuple(v for v, _ in pairs) for pairs in (declared, outputs))
        return Graph(name, values, tuple(nodes), results, ins if any(ins) else (), outs if any(outs) else ())

    def close(self) -> None:
        """A closing brace on a line of its own."""
        line = self.take()
        line.expect("}")
        _end(line)

    def node(self) -> Node:
        """A node with its regions."""
        cursor = self.take()
        remark = _REMARK.search(cursor.text)
        if remark is not None:
            cursor.text = cursor.text[: remark.start()]
        source, scope = (remark["source"] or "", remark["scope"] or "") if remark is not None else ("", "")
        results: tuple[Value, ...] = ()
        if cursor.text.startswith("%", cursor.place()):
            results = tuple(v for v, _ in cursor.items(lambda: self.declared(cursor)))
            cursor.expect("=")
        op = cursor.match(WORD, "an operation")
        attrs = dict(cursor.items(lambda: self.attribute(cursor, op, results), "{", "}")) if cursor.text.startswith("{", cursor.at) else {}
        tiled = cursor.items(lambda: self.tiling(cursor), "(", ")") if cursor.accept_word("tiled") else ()
        inputs = cursor.items(lambda: self.value(cursor)) if cursor.text.startswith("%", cursor.place()) else ()
        regions: list[Graph] = []
        if cursor.accept("{"):
            while self.starts("region"):
                regions.append(self.graph("region"))
            self.close()
        _end(cursor)
        tilings = tuple(one(inputs, results) for one in tiled)
        return Node(op, inputs, results, MappingProxyType(attrs), tuple(regions), source, scope, tilings)

    def declared(self, cursor: Cursor) -> tuple[Value, str]:
        """%3 'name': f32[2,4], a value seen for the first time."""
        start = cursor.place()
        number = cursor.match(_VALUE, "a value")
        if number in self.values:
            cursor.fail("a value that is not defined above", start)
        name = _quoted(cursor)
        cursor.expect(":")
        self.values[number] = Value(TensorType(*cursor.array_type()), name)
        return self.values[number], name

    def value(self, cursor: Cursor) -> Value:
        """A value that is defined above."""
        start = cursor.place()
        number = cursor.match(_VALUE, "a value")
        return self.values[number] if number in self.values else cursor.fail("a value that is defined above", start)

    # --- how kernels are cut

    def tiling(self, cursor: Cursor) -> Callable[[Sequence[Value], Sequence[Value]], Tiling]:
        """[128 of 1024, 64] parts 2 reads (%0[x0]) writes (%1[x0, x1]), once the node's operands and results are known."""
        tiling = _tiling(cursor)
        sides = [
            cursor.items(lambda: self.access(cursor, tiling), "(", ")") if cursor.accept_word(word) else () for word in ("reads", "writes")
        ]

        def numbered(inputs: Sequence[Value], results: Sequence[Value]) -> Tiling:
            first = {value: n for n, value in reversed(list(enumerate((*inputs, *results))))}
            made = {value: len(inputs) + n for n, value in enumerate(results)}
            reads, writes = (tuple(one(number) for one in side) for side, number in zip(sides, (first, first | made), strict=True))
            return replace(tiling, reads=reads, writes=writes)

        return numbered

    def access(self, cursor: Cursor, tiling: Tiling) -> Callable[[Mapping[Value, int]], Access]:
        """%0[x0, 224 at (-1 + 2*x1 + 1*x3)/1], once operands have numbers."""
        start = cursor.place()
        value = self.value(cursor)
        axes = cursor.items(lambda: self.access_axis(cursor, tiling), "[", "]")

        def numbered(number: Mapping[Value, int]) -> Access:
            if not {value, *(added for _, added in axes if added is not None)} <= number.keys():
                cursor.fail("operands and results of the node only", start)
            found = (AccessAxis(bound, None if added is None else number[added]) for bound, added in axes)
            return Access(number[value], tuple(found))

        return numbered

    def access_axis(self, cursor: Cursor, tiling: Tiling) -> tuple[Bound, Value | None]:
        """x0, or 224 at (-1 + 2*x1)/1, or 128 at (0 + 1*x0)/1 from %1."""
        at = cursor.place()
        if cursor.accept("x"):
            axis = cursor.integer()
            size = tiling.sizes[axis] if 0 <= axis < len(tiling.axes) else cursor.fail(f"x0 to x{len(tiling.axes) - 1}", at)
            return Bound(size, ((axis, 1),)), None
        return read_bound(cursor), self.value(cursor) if cursor.accept_word("from") else None

    # --- attributes

    def attribute(self, cursor: Cursor, op: str, results: tuple[Value, ...]) -> tuple[str, Any]:
        """name=value, read as the attribute's name says."""
        name = cursor.match(WORD, "an attribute")
        cursor.expect("=")
        if name == "data":
            return name, self.array(cursor, results[0].type)
        if op == "fused":
            return name, _kind(cursor)
        return name, _READ.get(name, _plain)(cursor)

    def array(self, cursor: Cursor, wanted: TensorType) -> np.ndarray:
        """The elements, row-major, or the checksum of an array that was given."""
        cursor.place()
        if cursor.text.startswith("crc32", cursor.at):
            start = cursor.at
            found = self.constants.get(cursor.match(_CHECKSUM, "a checksum"))
            return cursor.fail("a constant in full, or its array in `constants`", start) if found is None else found
        return np.array(cursor.items(lambda: _number(cursor), "[", "]"), wanted.dtype.numpy).reshape(wanted.shape)


def _end(cursor: Cursor) -> None:
    if cursor.place() != len(cursor.text):
        cursor.fail("the end of the line")


def _quoted(cursor: Cursor) -> str:
    """A name in quotes, if one comes here."""
    found = _QUOTED.match(cursor.text, cursor.place())
    return ast.literal_eval(cursor.match(_QUOTED, "a name")) if found else ""


def _number(cursor: Cursor) -> int | float | bool:
    for word, value in (("True", True), ("False", False)):
        if cursor.accept_word(word):
            return value
    return cursor.scalar()


def _plain(cursor: Cursor) -> Any:
    """A number, a word, or a tuple of such."""
    at = cursor.place()
    if cursor.text.startswith("(", at):
        return cursor.items(lambda: _plain(cursor), "(", ")")
    word = WORD.match(cursor.text, at)
    return cursor.match(WORD, "a word") if word and word[0] not in ("True", "False", "inf", "nan") else _number(cursor)


def _kind(cursor: Cursor) -> Kind:
    """The kind of a kernel."""
    start = cursor.place()
    word = cursor.match(WORD, "a kind of kernel")
    return Kind(word) if word in tuple(Kind) else cursor.fail(f"one of {', '.join(Kind)}", start)


def _labels(cursor: Cursor) -> tuple[int, ...]:
    return cursor.items(cursor.integer, "[", "]")


def _contraction(cursor: Cursor) -> Contraction:
    """[0,1] . [1,2] -> [0,2] sliding [...] bounds [...]."""
    lhs = _labels(cursor)
    cursor.expect(".")
    rhs = _labels(cursor)
    cursor.expect("->")
    out = _labels(cursor)
    sliding = cursor.items(lambda: read_sliding(cursor), "[", "]") if cursor.accept_word("sliding") else ()
    bounds = cursor.items(lambda: read_bound(cursor), "[", "]") if cursor.accept_word("bounds") else ()
    return Contraction(lhs, rhs, out, sliding, bounds)


def _view(cursor: Cursor) -> tuple[ViewAxis, ...]:
    return cursor.items(lambda: _view_axis(cursor), "(", ")")


def _view_axis(cursor: Cursor) -> ViewAxis:
    """extent*pitch:daxis*step+origin/dilation."""
    extent, pitch, axis, step = cursor.integer(), cursor.integer_after("*"), cursor.integer_after(":d"), cursor.integer_after("*")
    cursor.accept("+")
    origin = cursor.integer()
    return ViewAxis(extent, pitch, axis, origin, step, cursor.integer() if cursor.accept("/") else 1)


def _tiling(cursor: Cursor) -> Tiling:
    """[128 of 1024, 64, 512 of 4096 sequential] parts 2."""
    axes = cursor.items(lambda: _tiled_axis(cursor), "[", "]")
    return Tiling(axes, cursor.integer() if cursor.accept_word("parts") else 1)


def _tiled_axis(cursor: Cursor) -> TiledAxis:
    tile = cursor.integer()
    size = cursor.integer() if cursor.accept_word("of") else tile
    return TiledAxis(size, tile, cursor.accept_word("sequential"))


_READ: Mapping[str, Callable[[Cursor], Any]] = {
    "contraction": _contraction,
    "view": _view,
    "views": lambda cursor: cursor.items(lambda: _view(cursor), "(", ")"),
}
"""Attributes that are no numbers, words or tuples of these -> how they are read."""
