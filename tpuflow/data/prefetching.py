"""`Prefetcher`: calls a function on a thread, one call ahead of the use of its results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

JOIN_SECONDS = 1.0


class Prefetcher(Generic[T]):
    """Calls `make` on a thread, one call at a time: `start` starts one, `result` waits for it and returns its result or raises its error.

    Calls never overlap, so `make` needs no lock.
    """

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self._thread: threading.Thread | None = None
        self._result: T | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Start the next call, unless it has been started."""
        if self._thread is None:
            # A daemon: a loader that never returns must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="tpuflow-ahead", daemon=True)
            self._thread.start()

    def result(self) -> T:
        """The result of the call that was started, or of one started now. Ctrl-C interrupts the wait, and the result is not lost."""
        self.start()
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        error, result = self._error, self._result
        self._error = self._result = None
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def join(self) -> bool:
        """Wait at most `JOIN_SECONDS` for a call that was started. Returns whether none is running any more."""
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._result = self._make()
        except BaseException as error:  # raised again by `take`
            self._error = error
