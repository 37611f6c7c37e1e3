"""Python's cyclic garbage collector, and where it rests."""

from __future__ import annotations

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
