"""Golden text of passes: a graph, and what each named pass makes of it. `python -m tests.golden_text` writes the results anew.

A file of tests/golden/passes/ is a sentence, a graph, and sections "-- pass-name", each with the graph after that pass; "the same" says
that the pass changed nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tpuflow.chips import get_chip
from tpuflow.compiler import PIPELINE
from tpuflow.lower.graph.parse import parse

FOLDER = Path(__file__).parent / "golden" / "passes"
CHIP = "tpu-v4"
PASSES = {step.name: step for step in reversed(PIPELINE)}
"""Where a pass stands twice in the pipeline, as it is the first time."""
UNCHANGED = "the same"
_SECTION = re.compile(r"^-- ([\w-]+)$", re.MULTILINE)


def files() -> Iterator[Path]:
    """Every golden file."""
    return iter(sorted(FOLDER.glob("*.txt")))


def renewed(text: str) -> str:
    """A file's text with the results that today's passes give."""
    head, *_ = _SECTION.split(text)
    sentence, _, graph_text = head.partition("graph ")
    graph = parse("graph " + graph_text)
    parts = [sentence.strip(), str(graph).rstrip()]
    for name in _SECTION.findall(text):
        before, graph = str(graph), PASSES[name].on(get_chip(CHIP))(graph)
        parts.append(f"-- {name}\n\n{UNCHANGED if str(graph) == before else str(graph).rstrip()}")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write every file anew."""
    for path in files():
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
