"""Figures that take minutes each, made in processes of their own, and kept in a JSON file as they come: row, side, figures."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
Rows = dict[str, dict[str, Figures]]
Task = tuple[Callable[..., Figures], tuple[Any, ...]]


def kept(path: Path) -> Rows:
    """What the file has."""
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, rows: Rows) -> None:
    """The file, with a line for each row."""
    lines = [f" {json.dumps(row)}: {json.dumps(sides, sort_keys=True)}" for row, sides in sorted(rows.items())]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def options(name: str, about: str | None) -> argparse.ArgumentParser:
    """The options that benchmarks beside XLA:TPU have."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=about)
    parser.add_argument("--compile", action="store_true", help="have XLA:TPU compile what the file does not have; ours stays as it is")
    parser.add_argument("--only", nargs="*", default=[""], metavar="TEXT", help="rows that have one of these texts, in this order")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (%(default)s)")
    return parser


def wanted(names: Iterable[str], texts: Iterable[str]) -> list[str]:
    """The rows that have one of the texts, in the order of these."""
    rows = list(names)
    return list(dict.fromkeys(name for text in texts for name in rows if text in name))


def make(path: Path, tasks: Mapping[tuple[str, str], Task], jobs: int) -> Rows:
    """Run the tasks, by row and side, so many at a time; each is written as soon as it is there. What the file has in the end."""
    begin = time.perf_counter()
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = {pool.submit(function, *arguments): key for key, (function, arguments) in tasks.items()}
        for number, future in enumerate(as_completed(futures), 1):
            row, side = futures[future]
            figures, rows = future.result(), kept(path)  # others may have written meanwhile
            rows.setdefault(row, {})[side] = figures
            write(path, rows)
            print(f"{number}/{len(tasks)} after {time.perf_counter() - begin:.0f} s: {row}, {side}: {figures}", flush=True)
    return kept(path)
