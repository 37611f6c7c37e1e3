"""Threads are told that the process ends: those that compile, and none that one of them is about to start."""

from __future__ import annotations

import atexit
import sys
import threading
import time

import pytest

from tpuflow.pjrt import table
from tpuflow.pjrt.shutdown import Shutdown, ShutdownError

TOLD = 200
LIMIT_SECONDS = 60


@pytest.fixture
def shutdown():
    made = Shutdown()
    yield made
    atexit.unregister(made.begin)


def test_a_thread_is_told_and_never_the_one_that_it_starts(shutdown, monkeypatch):
    """Between its creation and its first instruction CPython (3.11) finds a new thread under its creator's number."""
    told, lost, finished = 0, list[object](), threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", lost.append)

    def compile_on_threads() -> None:
        nonlocal told
        while told < TOLD:
            try:
                with shutdown.compiling():
                    while True:
                        threading.Thread(target=int).start()
            except ShutdownError:
                told += 1
        finished.set()

    threading.Thread(target=compile_on_threads, daemon=True).start()
    began = time.monotonic()
    while not finished.is_set() and not lost and time.monotonic() - began < LIMIT_SECONDS:
        shutdown._look()
        time.sleep(0.0005)
    assert (told, lost) == (TOLD, [])


@pytest.mark.parametrize("name", ["Client_Compile", "LoadedExecutable_Execute", *sorted(table.INFALLIBLE)])
def test_what_jaxlib_takes_no_error_from_is_answered_while_the_process_ends(name, shutdown, monkeypatch):
    """A thread of jaxlib's own that has compiled makes an object of what it got, and aborts the process if one of these entries fails."""

    def refused() -> None:
        raise ShutdownError

    monkeypatch.setattr(shutdown, "begun", True)
    monkeypatch.setattr(shutdown, "hold", refused)
    monkeypatch.setattr(table, "SHUTDOWN", shutdown)
    answered = []
    error = table._guarded(name, answered.append)([])
    assert (bool(answered), error is None) == (name in table.INFALLIBLE,) * 2
