"""The graph as text: canonical, deterministic, one node a line, stable numbers, the user's source line at the right."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tpuflow.lower.graph.graph import Graph, Node, Value
from tpuflow.lower.graph.tiling import Tiling

_SOURCE_COLUMN = 100
_SHOWN_ELEMS = 8


class _Names:
    """%0, %1, ... in order of first mention."""

    def __init__(self) -> None:
        self._numbers: dict[Value, int] = {}

    def __call__(self, value: Value) -> str:
        return f"%{self._numbers.setdefault(value, len(self._numbers))}"


def to_text(graph: Graph) -> str:
    """The whole graph, ending in a newline. Two graphs of one structure have one text, whatever they were built from."""
    return "\n".join(_graph_lines(graph, _Names(), "graph ", "")) + "\n"


def node_text(node: Node) -> str:
    """One node without its regions, values numbered from the node's own operands: for error messages."""
    line = _head(node, _Names())
    return f"{line}  # {node.source}" if node.source else line


def _graph_lines(graph: Graph, names: _Names, keyword: str, indent: str) -> Iterator[str]:
    inputs = ", ".join(_declared(v, names, _name_of(graph.input_names, i)) for i, v in enumerate(graph.inputs))
    yield f"{indent}{keyword}{graph.name}({inputs}) {{"
    for node in graph.nodes:
        yield from _node_lines(node, names, indent + "  ")
    outputs = (f"{names(v)}{_name_of(graph.output_names, i)}" for i, v in enumerate(graph.outputs))
    yield f"{indent}  return {', '.join(outputs)}".rstrip()
    yield f"{indent}}}"


def _name_of(names: tuple[str, ...], i: int) -> str:
    return f" {names[i]!r}" if i < len(names) and names[i] else ""


def _declared(value: Value, names: _Names, name: str = "") -> str:
    return f"{names(value)}{name}: {value.type}"


def _node_lines(node: Node, names: _Names, indent: str) -> Iterator[str]:
    line = f"{indent}{_head(node, names)}{' {' if node.regions else ''}"
    remark = "  ".join(filter(None, (node.source, f"[{node.scope}]" if node.scope else "")))
    yield f"{line:<{_SOURCE_COLUMN}}  # {remark}" if remark else line
    for region in node.regions:
        yield from _graph_lines(region, names, "region ", indent + "  ")
    if node.regions:
        yield f"{indent}}}"


def _head(node: Node, names: _Names) -> str:
    operands = ", ".join(map(names, node.inputs))
    results = ", ".join(_declared(v, names) for v in node.results)
    attrs = ", ".join(f"{k}={_attr(v)}" for k, v in sorted(node.attrs.items()))
    call = f"{node.op}{{{attrs}}}" if attrs else node.op
    tiled = (
        f"tiled({', '.join(_tiling(t, [names(v) for v in (*node.inputs, *node.results)]) for t in node.tilings)})" if node.tilings else ""
    )
    return " ".join(filter(None, (results and f"{results} =", call, tiled, operands)))


def _tiling(tiling: Tiling, operands: Sequence[str]) -> str:
    """How a kernel is cut, and what its points read and write of operands with these names."""
    sides = {"reads": tiling.reads, "writes": tiling.writes}
    said = [f"{word} ({', '.join(a.text(operands, tiling.sizes) for a in found)})" for word, found in sides.items() if found]
    return " ".join((str(tiling), *said))


def _attr(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, tuple):
        return f"({','.join(map(_attr, value))})"
    return repr(value) if isinstance(value, float) else str(value)


def _array(data: np.ndarray) -> str:
    """A small array in full, a large one by the checksum of its bytes."""
    if data.size <= _SHOWN_ELEMS:
        return "[" + ",".join(repr(x) for x in data.reshape(-1).tolist()) + "]"
    return f"crc32:{zlib.crc32(np.ascontiguousarray(data).tobytes()):08x}"
