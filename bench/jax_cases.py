"""A plugin of pytest's for `bench.jax_tests`: runs a file's cases, all or in a seeded order until enough of them were not skipped, and
writes what becomes of each to a file, one line of JSON when it begins and one when it ends. A case that ends the process, or never ends, is
the one whose end is missing.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax._src.test_util  # which has the option jax_test_dut
import pytest

LONGEST = 2000
"""Characters of a failure's text that are kept."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to write, and which cases: all in a seeded order, until `--cases-sample` were not skipped (0: all in their own order), or those
    that `--cases-only` lists; none of `--cases-done`. `--cases-as`: the device that they are told they run on, "tpu"."""
    group = parser.getgroup("cases")
    group.addoption("--cases-to", type=Path, required=True)
    group.addoption("--cases-sample", type=int, default=0)
    group.addoption("--cases-seed", type=int, default=0)
    group.addoption("--cases-only", type=Path)
    group.addoption("--cases-done", type=Path)
    group.addoption("--cases-as", default="")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to write. JAX's backends are begun first: a file that asks for more devices than the environment says gets what it says."""
    jax.devices()
    config.pluginmanager.register(_Cases(config.option), "cases")


class _Cases:
    """What chooses and what writes."""

    def __init__(self, options: Any):
        self._options = options
        self._file = options.cases_to.open("a", encoding="utf-8")
        self._asked: set[str] = set()

    def pytest_collection_modifyitems(self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
        self._session = session
        self._write(collected=len(items))
        by_name = {item.nodeid: item for item in items}
        chosen = self._chosen(list(by_name))
        config.hook.pytest_deselected(items=[by_name[name] for name in by_name.keys() - set(chosen)])
        items[:] = [by_name[name] for name in chosen]

    def pytest_collection_finish(self) -> None:
        """Not before: the cases of a parameterised test depend on it."""
        jax.config.update("jax_test_dut", self._options.cases_as)

    def _chosen(self, names: list[str]) -> list[str]:
        options = self._options
        if options.cases_only:
            only = _lines(options.cases_only)
            names = [name for name in names if name in only]
        elif options.cases_sample:
            random.Random(options.cases_seed).shuffle(names := sorted(names))
        done = _lines(options.cases_done) if options.cases_done else set()
        return [name for name in names if name not in done]

    def pytest_runtest_logfinish(self) -> None:
        if 0 < self._options.cases_sample <= len(self._asked):
            self._session.shouldstop = "enough cases"

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(case=nodeid, began=time.time())

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        outcome: Any = yield
        report = outcome.get_result()
        if report.when == "call" or report.outcome != "passed":
            self._write(case=item.nodeid, outcome=report.outcome, seconds=round(report.duration, 3), **_failure(call))
        if report.outcome == "failed" or (report.when == "call" and report.outcome == "passed"):
            self._asked.add(item.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(unreadable=report.longreprtext[-LONGEST:])

    def _write(self, **record: Any) -> None:
        print(json.dumps(record), file=self._file, flush=True)


def _lines(path: Path) -> set[str]:
    return set(path.read_text(encoding="utf-8").splitlines())


def _failure(call: pytest.CallInfo[None]) -> dict[str, str]:
    """Kind and text of what was raised."""
    if call.excinfo is None:
        return {}
    return {"kind": call.excinfo.type.__name__, "text": str(call.excinfo.value)[:LONGEST]}
