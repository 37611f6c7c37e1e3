"""Figures that take minutes each, made in processes of their own, and kept in a JSON file as they come: row, side, figures."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
Rows = dict[str, dict[str, Figures]]
Task = tuple[Callable[..., Figures], tuple[Any, ...]]


def kept(path: Path) -> Rows:
    """What the file has."""
    return json.loads(path.read_text()) if path.exists() else {}


def make(path: Path, tasks: Mapping[tuple[str, str], Task], jobs: int) -> Rows:
    """Run the tasks, by row and side, so many at a time; each is written as soon as it is there. What the file has in the end."""
    begin = time.perf_counter()
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = {pool.submit(function, *arguments): key for key, (function, arguments) in tasks.items()}
        for number, future in enumerate(as_completed(futures), 1):
            row, side = futures[future]
            figures, rows = future.result(), kept(path)  # others may have written meanwhile
            rows.setdefault(row, {})[side] = figures
            path.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
            print(f"{number}/{len(tasks)} after {time.perf_counter() - begin:.0f} s: {row}, {side}: {figures}", flush=True)
    return kept(path)
