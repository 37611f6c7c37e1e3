"""Python's cyclic garbage collector, and where it rests."""

from __future__ import annotations

import atexit
import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def undisturbed() -> Iterator[None]:
    """Without the collector, which else walks over a growing graph again and again (a quarter of the time). Also a decorator.

    Importing, tracing and compiling make next to no cycles: what they drop is freed as ever.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def between_pieces() -> None:
    """Between large pieces of work: where the collector rests, what the piece before has left in cycles is collected here."""
    if not gc.isenabled():
        gc.collect()


@functools.cache
def end_at_once() -> None:
    """Let the process end without the collector's last walk over all there is: the system takes the memory back as it is."""
    atexit.register(gc.freeze)
