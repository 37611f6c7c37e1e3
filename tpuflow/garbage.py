"""Where Python's cyclic garbage collector is switched off, since it costs much time and frees next to nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 10_000
"""Objects that a block may leave to the collector's next pass over young objects, which comes at once and takes 0.5 us for each."""
TOO_MANY = 1_000_000
"""Objects that blocks may leave as old ones, garbage among them, before a block begins with a full collection."""

_left = 0
"""Objects left as old ones since then."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Switch the cyclic collector off within the block; also a decorator.

    Around importing, tracing and compiling, which make next to no cycles: the collector would traverse the growing graph again and again,
    for a quarter of the time. Reference counting frees what they drop.
    """
    if not gc.isenabled():
        yield
        return
    _collect_what_was_left()
    gc.disable()
    try:
        yield
    finally:
        _leave_as_old()
        gc.enable()


def _collect_what_was_left() -> None:
    global _left
    if _left > TOO_MANY:
        gc.collect()
        _left = 0


def _leave_as_old() -> None:
    """Spare the objects that were just made the pass over young ones: nearly all of them are in use. Not if somebody has frozen objects,
    which would thaw."""
    global _left
    made, _, _ = gc.get_count()
    if made > MANY and not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
        _left += made


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
