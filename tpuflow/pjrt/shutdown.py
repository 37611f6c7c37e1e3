"""Interpreter shutdown while other threads use the device: keeps them from aborting the process.

At shutdown Python ends a daemon thread when it next waits for the GIL, by unwinding its stack. If frames of jaxlib are on that stack, this
aborts the process, whatever exit status the program had (JAX's CPU backend has the same problem). Therefore, before the interpreter shuts
down, a thread that calls into the device is blocked in the call for ever, as Python itself does from 3.14 on; the main thread waits until
every other thread is blocked or has left JAX. A thread that compiles gets an exception (`ShutdownError`) instead, since a compilation can
take long.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

LOOK_SECONDS = 0.02
LOOKS = 5
"""After so many looks without moving, a thread outside of JAX counts as waiting for something else."""
LIMIT_SECONDS = 30.0
"""The longest wait for threads inside of JAX: one in XLA's compiler cannot be interrupted."""
OUTSIDE_SECONDS = 1.0
"""The longest wait for threads that are busy outside of JAX, and may yet call it."""
ENDED = "the process is about to end: the device takes nothing more from its threads."
_PACKAGES = [found.origin or "" for name in ("jax", "jaxlib") if (found := importlib.util.find_spec(name)) is not None]
_WITHIN = tuple(os.path.join(os.path.dirname(file), "") for file in (*_PACKAGES, __file__))
"""The folders of JAX's code and of the plugin's."""


class ShutdownError(BaseException):
    """Raised in a thread that compiles, or calls the device, while the process ends."""

    def __init__(self, text: str = ENDED):
        super().__init__(text)


class Shutdown:
    """The state of the shutdown: whether it has begun, which threads compile, and which are blocked."""

    def __init__(self) -> None:
        self.begun, self._expected = False, False
        self._compiling: set[int] = set()
        self._held: set[int] = set()
        self._places: dict[int, tuple[FrameType, int]] = {}
        self._never = threading.Lock()
        self._never.acquire()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Around a compilation: its thread can be interrupted. The first one registers the exit handler, so that a process that uses other
        backends alone has none."""
        if not self._expected:
            self._expected = True
            atexit.register(self.begin)
        thread = threading.get_ident()
        try:
            self._compiling.add(thread)
            yield
        finally:
            self._compiling.discard(thread)

    def hold(self) -> None:
        """Called by every entry once shutdown has begun. Blocks the thread for ever, except the main thread, which still destroys arrays.

        Raises:
          ShutdownError: the thread is one of jaxlib's own, which may be waited for.
        """
        if threading.get_ident() == threading.main_thread().ident:
            return
        if sys._getframe(1).f_back is None:
            raise ShutdownError
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # or a signal would let it ask for the GIL
        self._held.add(threading.get_ident())
        self._never.acquire()

    def begin(self) -> None:
        """The exit handler, on the main thread: wait until all other threads are blocked or have left JAX, within the limits above."""
        self.begun, still, began = True, 0, time.monotonic()
        threading.excepthook = _quiet(threading.excepthook)
        while still < LOOKS and len(sys._current_frames()) > 1 and time.monotonic() - began < LIMIT_SECONDS:
            inside, moving = self._look()
            still = 0 if inside or (moving and time.monotonic() - began < OUTSIDE_SECONDS) else still + 1
            time.sleep(LOOK_SECONDS)
        self._places.clear()  # frames hold arrays

    def _look(self) -> tuple[bool, bool]:
        """(whether a thread is inside of JAX, whether one outside of it has moved); threads that compile are interrupted, once each."""
        inside = moving = False
        for thread, frame in sys._current_frames().items():
            if thread == threading.get_ident() or thread in self._held:
                continue
            place = frame, frame.f_lasti
            inside, moving = inside or _within(frame), moving or self._places.get(thread) != place
            self._places[thread] = place
            if thread in self._compiling and not _starts_any():
                self._compiling.discard(thread)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(ShutdownError))
        return inside, moving


def _quiet(hook: Any) -> Any:
    """A `threading.excepthook` that does not print `ShutdownError`s."""
    return lambda args: None if ENDED in str(args.exc_value) else hook(args)


def _starts_any() -> bool:
    """Whether a thread is about to start. Until it runs, CPython knows it by the id of the thread that starts it, and an exception for that
    id would reach the new thread instead, which would then never run."""
    return any(thread.ident is None for thread in threading.enumerate())


def _within(frame: FrameType) -> bool:
    """Whether JAX's code or the plugin's is on this stack."""
    return any(code.co_filename.startswith(_WITHIN) for code in _codes(frame))


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


SHUTDOWN = Shutdown()
