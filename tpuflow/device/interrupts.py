"""Ctrl-C deferred while a launch runs, so that the device's state is never lost; KeyboardInterrupt is raised right after it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Defer Ctrl-C to the end of the `with` block, where it raises KeyboardInterrupt; of nested blocks, to the end of the outermost.

    A launch donates the state to the device, so an exception before its results are stored would lose it. Only the main thread receives
    Ctrl-C; in other threads, and if the program has a handler of its own, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pressed:
        raise KeyboardInterrupt
