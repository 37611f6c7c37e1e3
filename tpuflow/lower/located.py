"""Adds the user's source line to errors that are raised while compiling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from tpuflow.lower.graph.graph import Node


@contextmanager
def located(stage: str) -> Iterator[None]:
    """Add a note to an error raised inside: the stage, and the user's line of the node being compiled, unless the message names it."""
    try:
        yield
    except Exception as error:
        node = _node_at_hand(error.__traceback__)
        if node is not None and not any(node.source in text for text in (str(error), *getattr(error, "__notes__", ()))):
            error.add_note(f"in {stage}, at {node.op!r} of {node.source}")
        raise


def _node_at_hand(trace: TracebackType | None) -> Node | None:
    """The node with a source line that is a local variable of the innermost frame of a traceback that has one."""
    found = None
    while trace is not None:
        nodes = [x for x in trace.tb_frame.f_locals.values() if isinstance(x, Node) and x.source]
        found, trace = (nodes[-1] if nodes else found), trace.tb_next
    return found
