"""Work done one call ahead on a thread: while one result is used, the next is made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

JOIN_SECONDS = 1.0


class Ahead(Generic[T]):
    """Calls of `make`, one at a time, each on a thread that ends with the call.

    `begin` starts a call, `take` gives its result, or raises the error it ended with. Calls never overlap, so `make` needs no lock.
    """

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self._thread: threading.Thread | None = None
        self._result: T | None = None
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Start the next call, unless it has been started."""
        if self._thread is None:
            # A daemon: a loader that never returns must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="tpuflow-ahead", daemon=True)
            self._thread.start()

    def take(self) -> T:
        """The result of the call under way, or of one started now. Ctrl-C ends the waiting and loses nothing."""
        self.begin()
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        error, result = self._error, self._result
        self._error = self._result = None
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def settle(self) -> bool:
        """Wait a second at most for the call under way; whether none is under way any more."""
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._result = self._make()
        except BaseException as error:  # raised again by `take`
            self._error = error
