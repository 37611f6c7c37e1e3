"""Where Python's cyclic garbage collector is switched off, since it costs much time and frees next to nothing."""

from __future__ import annotations

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


@contextmanager
def last_work() -> Iterator[None]:
    """`undisturbed` around what a process does last: what it leaves is not collected, since the operating system takes the memory back."""
    with undisturbed():
        yield
        gc.freeze()  # before the collector is on again, and would walk over all that was made; nor does it at the end of the process
