"""The end of the process while other threads use the device.

Python ends a daemon thread where it next waits for the GIL, by unwinding its stack. If jaxlib's frames are on it, that aborts the process,
whatever exit status the program had (JAX's CPU backend has that, too). So before the interpreter shuts down, a thread that asks something
of the device is held where it asks, for good, as Python itself does from 3.14 on; the others are waited for until they have asked or have
left JAX. Only a thread that compiles is told to stop: that can take long, and there what it is told can be raised.
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
"""A thread outside of JAX that has not moved in so many is waiting for something else."""
LIMIT_SECONDS = 30.0
"""Of waiting for a thread in machine code: XLA's compiler cannot be told anything."""
OUTSIDE_SECONDS = 1.0
"""Of waiting for threads that are busy outside of JAX, and may yet call it."""
ENDED = "the process is about to end: the device takes nothing more from its threads."
_PACKAGES = [found.origin or "" for name in ("jax", "jaxlib") if (found := importlib.util.find_spec(name)) is not None]
_WITHIN = tuple(os.path.join(os.path.dirname(file), "") for file in (*_PACKAGES, __file__))
"""The folders of JAX's code and of the plugin's."""


class Ended(BaseException):
    """What a thread is told that compiles for the device while the process ends."""

    def __init__(self, text: str = ENDED):
        super().__init__(text)


class Ending:
    """Whether the process is about to end, and which threads compile and which are held."""

    def __init__(self) -> None:
        self.begun, self._expected = False, False
        self._compiling: set[int] = set()
        self._held: set[int] = set()
        self._places: dict[int, tuple[FrameType, int]] = {}
        self._never = threading.Lock()
        self._never.acquire()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Around a compilation, on the thread that does it, which can be told to stop. Once there has been one, the exit is prepared for:
        who uses other backends alone notices nothing."""
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
        """In an entry, once it has begun: does not return, but in the main thread, which still has arrays to destroy.

        Raises:
          Ended: the thread is one of jaxlib's own, which may be waited for.
        """
        if threading.get_ident() == threading.main_thread().ident:
            return
        if sys._getframe(1).f_back is None:
            raise Ended
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # or a signal would let it ask for the GIL
        self._held.add(threading.get_ident())
        self._never.acquire()

    def begin(self) -> None:
        """From the main thread: let all others ask for something or leave JAX, and wait for that, but not for ever."""
        self.begun, still, began = True, 0, time.monotonic()
        threading.excepthook = _quiet(threading.excepthook)
        while still < LOOKS and len(sys._current_frames()) > 1 and time.monotonic() - began < LIMIT_SECONDS:
            inside, moving = self._look()
            still = 0 if inside or (moving and time.monotonic() - began < OUTSIDE_SECONDS) else still + 1
            time.sleep(LOOK_SECONDS)
        self._places.clear()  # frames hold arrays

    def _look(self) -> tuple[bool, bool]:
        """Whether a thread is inside of JAX, and whether one outside has moved; those that compile are told to stop, once."""
        inside = moving = False
        for thread, frame in sys._current_frames().items():
            if thread == threading.get_ident() or thread in self._held:
                continue
            place = frame, frame.f_lasti
            inside, moving = inside or _within(frame), moving or self._places.get(thread) != place
            self._places[thread] = place
            if thread in self._compiling and not _starts_any():
                self._compiling.discard(thread)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Ended))
        return inside, moving


def _quiet(hook: Any) -> Any:
    """A hook for exceptions of threads that says nothing of what was refused at the end."""
    return lambda args: None if ENDED in str(args.exc_value) else hook(args)


def _starts_any() -> bool:
    """Whether a thread is about to start. Until it runs, CPython knows it by the number of the one that starts it: it would be told in
    that one's place, and never run."""
    return any(thread.ident is None for thread in threading.enumerate())


def _within(frame: FrameType) -> bool:
    """Whether JAX's code or the plugin's is on this stack."""
    return any(code.co_filename.startswith(_WITHIN) for code in _codes(frame))


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


ENDING = Ending()
