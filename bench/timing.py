"""What the benchmarks share: interleaved timing, medians, and the command line that writes JSON."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def interleaved(contenders: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of every contender in every round, one after the other within a round, so that drift hits all alike."""
    for run in contenders.values():
        for _ in range(warmup):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Median of each contender."""
    return {name: statistics.median(values) for name, values in seconds.items()}


LEAST_SECONDS = 0.01
"""A round repeats a call until it takes so long: what is shorter is not measured well."""


def call_seconds(calls: Mapping[str, Callable[[], object]], like: str, rounds: int) -> dict[str, float]:
    """Median seconds of one call of each contender, in turn; a round has as many calls as one of `like` needs for `LEAST_SECONDS`."""
    began = time.perf_counter()
    calls[like]()
    repeats = max(1, math.ceil(LEAST_SECONDS / (time.perf_counter() - began)))
    runs = {name: functools.partial(_repeat, call, repeats) for name, call in calls.items()}
    return {name: seconds / repeats for name, seconds in medians(interleaved(runs, rounds)).items()}


def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def machine() -> str:
    """What the figures were taken on."""
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def publish(description: str | None, run: Callable[[], tuple[str, Mapping[str, Any]]]) -> None:
    """Command line of a benchmark: print its table, and write its figures with --json."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    text, figures = run()
    print(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n")
