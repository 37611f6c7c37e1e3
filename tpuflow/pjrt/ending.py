"""The end of the process while other threads use the device.

Python ends a daemon thread where it next waits for the GIL, by unwinding its stack. If jaxlib's frames are on it, that aborts the process,
whatever exit status the program had (JAX's CPU backend has that, too). So before the interpreter shuts down, threads that are inside of JAX
are told to exit, what they ask of the device is refused, and they are waited for.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import time
from collections.abc import Iterator
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
_WITHIN = ("/jax/", "/jaxlib/", "/tpuflow/")


class Ended(RuntimeError):
    """What a thread is told that uses the device while the process ends."""


class Ending:
    """Whether the process is about to end, and which threads have been told to exit."""

    def __init__(self) -> None:
        self.begun, self._expected = False, False
        self.guards: set[CodeType] = set()  # functions that nothing may be raised in
        self._told: set[int] = set()
        self._places: dict[int, tuple[FrameType, int]] = {}

    def expect(self) -> None:
        """Begin at the exit, once the device has a program: who uses other backends alone notices nothing."""
        if not self._expected:
            self._expected = True
            atexit.register(self.begin)

    def check(self) -> None:
        """In an entry, once it has begun.

        Raises:
          Ended: this is not the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            raise Ended(ENDED)

    def seen(self, error: BaseException) -> BaseException:
        """What an entry says that ended so: of a thread that was told to exit, that it was."""
        return Ended(ENDED) if self.begun and isinstance(error, SystemExit) else error

    def begin(self) -> None:
        """From the main thread: let all others leave JAX, and wait for that, but not for ever."""
        self.begun, still, began = True, 0, time.monotonic()
        threading.excepthook = _quiet(threading.excepthook)
        while still < LOOKS and len(sys._current_frames()) > 1 and time.monotonic() - began < LIMIT_SECONDS:
            inside, moving = self._look()
            still = 0 if inside or (moving and time.monotonic() - began < OUTSIDE_SECONDS) else still + 1
            time.sleep(LOOK_SECONDS)
        self._places.clear()  # frames hold arrays

    def _look(self) -> tuple[bool, bool]:
        """Whether a thread is inside of JAX, and whether one outside has moved; those inside are told to exit, once."""
        inside = moving = False
        for thread, frame in sys._current_frames().items():
            if thread == threading.get_ident():
                continue
            place, within = (frame, frame.f_lasti), any(part in code.co_filename for code in _codes(frame) for part in _WITHIN)
            inside, moving = inside or within, moving or self._places.get(thread) != place
            self._places[thread] = place
            if within and thread not in self._told and frame.f_code not in self.guards:
                self._told.add(thread)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
        return inside, moving


def _quiet(hook: Any) -> Any:
    """A hook for exceptions of threads that says nothing of what was refused at the end."""
    return lambda args: None if ENDED in str(args.exc_value) else hook(args)


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


ENDING = Ending()
