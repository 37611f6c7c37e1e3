"""Golden text of passes and schedules: a graph, and what becomes of it. `python -m tests.golden_text` writes the results anew.

A file of tests/golden/passes/ is a sentence, a graph, and sections "-- pass-name", each with the graph after that pass, or
"-- pass-name-saving-memory", after its form for programs that do not fit; "the same" says that the pass changed nothing. In
tests/golden/schedule/ sections are "-- chip-name", each with the kernels of the graph compiled for that chip, and how they are cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tpuflow.chips import CHIPS, Chip, get_chip
from tpuflow.compiler import PIPELINE, compile_graph
from tpuflow.lower.graph.graph import Graph
from tpuflow.lower.graph.parse import parse

FOLDER = Path(__file__).parent / "golden" / "passes"
SCHEDULES = FOLDER.parent / "schedule"
CHIP = "tpu-v4"
PASSES = {step.name: step for step in reversed(PIPELINE)}
"""Where a pass stands twice in the pipeline, as it is the first time."""
SAVING = {f"{name}-saving-memory": step.saving_memory() for name, step in PASSES.items()}
UNCHANGED = "the same"
_SECTION = re.compile(r"^-- ([\w-]+)$", re.MULTILINE)


def files(folder: Path = FOLDER) -> Iterator[Path]:
    """Every golden file of a folder."""
    return iter(sorted(folder.glob("*.txt")))


def renewed(text: str) -> str:
    """A file's text with the results that today's passes give, or today's schedule on each chip."""
    head, *_ = _SECTION.split(text)
    sentence, _, graph_text = head.partition("graph ")
    start = graph = parse("graph " + graph_text)
    parts = [sentence.strip(), str(graph).rstrip()]
    for name in _SECTION.findall(text):
        before, graph = str(graph), stages(start, name)["kernels"] if name in CHIPS else (PASSES | SAVING)[name].on(get_chip(CHIP))(graph)
        parts.append(f"-- {name}\n\n{UNCHANGED if str(graph) == before else str(graph).rstrip()}")
    return "\n\n".join(parts) + "\n"


def stages(graph: Graph, chip: str | Chip) -> dict[str, Graph]:
    """A graph compiled for a chip, at every stage."""
    found: dict[str, Graph] = {}
    compile_graph(graph, chip=chip, watch=found.__setitem__)
    return found


def main() -> None:
    """Write every file anew."""
    for path in (*files(), *files(SCHEDULES)):
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
