"""The user's source line on every error that compiling ends in, wherever it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from tpuflow.lower.graph.graph import Node


@contextmanager
def located(stage: str) -> Iterator[None]:
    """Note on an error, if it does not say so itself, at which line of the user's program a stage of compiling was when it came."""
    try:
        yield
    except Exception as error:
        node = _node_at_hand(error.__traceback__)
        if node is not None and not any(node.source in text for text in (str(error), *getattr(error, "__notes__", ()))):
            error.add_note(f"in {stage}, at {node.op!r} of {node.source}")
        raise


def _node_at_hand(trace: TracebackType | None) -> Node | None:
    """The node, with a source line, that the innermost call of a traceback was given or came to."""
    found = None
    while trace is not None:
        nodes = [x for x in trace.tb_frame.f_locals.values() if isinstance(x, Node) and x.source]
        found, trace = (nodes[-1] if nodes else found), trace.tb_next
    return found
