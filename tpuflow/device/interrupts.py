"""Ctrl-C that never loses the device's state: held back while a launch is under way, raised right after it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block, where it raises KeyboardInterrupt.

    A launch donates the state to the device: an exception between launch and hand-over would lose it. Only the main thread can receive
    Ctrl-C; elsewhere, and where the program has a handler of its own, this does nothing. Of blocks inside each other the outermost holds.
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
