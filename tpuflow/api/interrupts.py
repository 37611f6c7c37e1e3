"""Ctrl-C that never loses the device's state: held back while a launch is under way, raised right after it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """Within `with Interrupts() as interrupts`, Ctrl-C raises KeyboardInterrupt, but not inside `with interrupts.held()`.

    A launch donates the state to the device: an exception between launch and hand-over would lose it. Only the main thread can
    receive Ctrl-C; elsewhere, and where the program has a handler of its own, this does nothing.
    """

    def __init__(self) -> None:
        self._held = self._pending = False
        self._previous: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold Ctrl-C back until the end of the block."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            self._pending = True
            return
        raise KeyboardInterrupt
