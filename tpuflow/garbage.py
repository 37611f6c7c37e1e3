"""Where Python's cyclic garbage collector is switched off, since it costs much time and frees next to nothing."""

from __future__ import annotations

import atexit
import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def undisturbed() -> Iterator[None]:
    """Switch the cyclic collector off within the block; also a decorator.

    Around importing, tracing and compiling, which make next to no cycles: the collector would traverse the growing graph again and again,
    for a quarter of the time. Reference counting frees what they drop.
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
    """Called between large pieces of work inside of `undisturbed`: collects the cycles that the last piece has left."""
    if not gc.isenabled():
        gc.collect()


@functools.cache
def end_at_once() -> None:
    """Skip the full collection at the end of the process; the operating system takes the memory back anyway."""
    atexit.register(gc.freeze)
