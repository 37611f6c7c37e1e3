"""What training steps cost, modelled, as a page of docs/: a table whose first columns say which step it is."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tpuflow.errors import OutOfMemoryError
from tpuflow.estimating.estimating import Estimate

DOCS = Path(__file__).parents[1] / "docs"
MIB = 2**20
MEASURES = ("ms a step", "matrix utilisation", "MiB at most", "of them arguments", "temporaries")


@dataclass(frozen=True, slots=True)
class Step:
    """A step by what tells it apart, one text for each of the page's first columns, and how its cost is modelled."""

    labels: tuple[str, ...]
    make: Callable[[], Estimate] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Page:
    """A page of docs/ by its file's name: the module that writes it, a title, lines about the steps, and what tells these apart."""

    name: str
    module: str
    title: str
    about: Sequence[str]
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step costs: modelled milliseconds, share of the matrix units' peak, planned MiB; or why there is none."""

    labels: tuple[str, ...]
    step_ms: float = 0.0
    mfu: float = 0.0
    peak_mib: float = 0.0
    arguments_mib: float = 0.0
    temporaries_mib: float = 0.0
    compile_seconds: float = 0.0
    fit: str = ""
    error: str = ""

    def __str__(self) -> str:
        """A row of the table."""
        memory = (f"{mib:.0f}" for mib in (self.peak_mib, self.arguments_mib, self.temporaries_mib))
        measures = (f"{self.step_ms:.2f}", f"{self.mfu:.1%}", *memory)
        return _row((*self.labels, *([self.error] + [""] * (len(MEASURES) - 1) if self.error else measures)))


def cost_of(step: Step) -> Cost:
    """Model a step."""
    began = time.perf_counter()
    try:
        made = step.make()
    except OutOfMemoryError as error:
        return Cost(step.labels, error=str(error).splitlines()[0])
    memory = made.memory
    return Cost(
        step.labels,
        1e3 * made.step_seconds,
        made.time.mfu,
        memory.peak_memory_in_bytes / MIB,
        memory.argument_size_in_bytes / MIB,
        memory.temp_size_in_bytes / MIB,
        time.perf_counter() - began,
        made.time.calibration.fit,
    )


def text_of(page: Page, costs: Sequence[Cost]) -> str:
    """The page."""
    heading = (*page.columns, *MEASURES)
    lines = [f"# {page.title}", "", f"Made by `python -m {page.module}`; do not edit. {page.about[0]}", *page.about[1:]]
    lines += ["Times are modelled ([how](timing.md), [how far off](accuracy.md)); memory is what the compiler planned.", ""]
    return "\n".join([*lines, _row(heading), "|" + "---|" * len(heading), *map(str, costs)]) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(page: Page, steps: Sequence[Step]) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {page.module}", description=f"{page.title}, as docs/{page.name}.")
    parser.add_argument("--only", help="model the rows that have this text in one of their first columns, and leave the page as it is")
    parser.add_argument("--json", type=Path, help="write all figures here")
    arguments = parser.parse_args()
    costs = []
    for step in steps:
        if arguments.only is None or arguments.only in step.labels:
            costs.append(cost_of(step))
            print(costs[-1], flush=True)
    if arguments.only is None:
        (DOCS / page.name).write_text(text_of(page, costs))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n")
