"""What is made once in a process, whichever threads ask for it first."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def once(function: Callable[[], T]) -> Callable[[], T]:
    """A decorator: as `functools.cache`, which lets two threads that call it at once both run the function."""
    made, lock = functools.cache(function), threading.RLock()

    @functools.wraps(function)
    def get() -> T:
        with lock:
            return made()

    return get
