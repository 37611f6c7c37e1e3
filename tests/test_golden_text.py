"""Graphs as text: what is written is read again, and passes make of a text the text that stands beside it."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests import golden_text
from tests.compile_cases import CASES
from tpuflow.chips import get_chip
from tpuflow.compiler import PIPELINE
from tpuflow.errors import GraphError
from tpuflow.lower.graph.graph import Graph
from tpuflow.lower.graph.interpret import interpret
from tpuflow.lower.graph.parse import parse

FILES = list(golden_text.files())


def stages(name: str) -> Iterator[Graph]:
    """A case's graph after its import and after every pass."""
    graph = CASES[name].graph()
    yield graph
    for step in PIPELINE:
        yield (graph := step.on(get_chip("generic"))(graph))


def constants(graph: Graph) -> dict[str, np.ndarray]:
    """The graph's arrays by the checksums that its text shows."""
    found = (np.ascontiguousarray(node.attrs["data"]) for node in graph.walk() if node.op == "constant")
    return {f"crc32:{zlib.crc32(data.tobytes()):08x}": data for data in found}


@pytest.mark.parametrize("name", CASES)
def test_a_graph_is_read_as_it_was_written_after_every_pass(name: str) -> None:
    for graph in stages(name):
        assert str(parse(str(graph), constants=constants(graph))) == str(graph)


def test_a_graph_that_was_read_computes_the_same() -> None:
    case = CASES["softmax"]
    for graph in stages("softmax"):
        for ours, theirs in zip(interpret(graph, *case.arguments), interpret(parse(str(graph)), *case.arguments), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("path", [*FILES, *golden_text.files(golden_text.SCHEDULES)], ids=lambda path: path.stem)
def test_passes_make_of_a_text_what_stands_beside_it(path: Path) -> None:
    written = path.read_text(encoding="utf-8")
    assert golden_text.renewed(written) == written, "look at what changed; python -m tests.golden_text writes it"


@pytest.mark.parametrize("name", golden_text.PASSES)
def test_every_pass_is_shown_at_work(name: str) -> None:
    changed = re.compile(rf"^-- {name}(?:-saving-memory)?\n\n(?!{golden_text.UNCHANGED}$)", re.MULTILINE)
    assert any(changed.search(path.read_text(encoding="utf-8")) for path in FILES)


GOOD = """graph f(%0 'x': f32[4]) {
  %1: f32[4] = exp %0
  return %1
}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("exp %0", "exp %7", "graph:2:20: found '%7', expected a value that is defined above"),
        ("%1: f32[4] =", "%0: f32[4] =", "graph:2:3: found '%0', expected a value that is not defined above"),
        ("f32[4] = exp", "f99[4] = exp", "graph:2:7: found 'f99', expected one of"),
        ("exp %0", "exp{axis=} %0", "graph:2:25: found '}', expected a number"),
        ("exp %0", "expo %0", "unknown operation 'expo'"),
        ("f32[4] = exp", "f32[5] = exp", "exp"),
        ("  return %1\n}\n", "", "graph: found the end of the text, expected a node, 'return' or '}'"),
        ("}\n", "}\nmore\n", "graph:5:1: found 'more', expected the end of the text"),
        ("exp %0", "fused{kind=team} %0", "graph:2:27: found 'team', expected one of map, reduce, dot, rows, several"),
        ("exp %0", "exp tiled([0 of]) %0", "graph:2:31: found"),
        ("exp %0", "constant{data=crc32:00000000}", "graph:2:30: found 'crc32', expected a constant in full, or its array"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_graph_is_refused_where_it_is_wrong(old: str, new: str, message: str) -> None:
    assert str(parse(GOOD)) == GOOD
    with pytest.raises(GraphError, match=re.escape(message)):
        parse(GOOD.replace(old, new))
