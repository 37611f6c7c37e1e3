"""What operations and those who call them share: bodies given by an importer, and the forms that no operation covers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tpuflow.lower.graph.graph import Value

Body = Callable[..., Sequence[Value]]
"""A computation inside of an operation: `body(builder, *values)` makes its nodes with the builder it is given, and returns its results."""


class UnsupportedForm(Exception):
    """Raised by an operation or a rule that does not cover what it is asked for; the importer adds where the user wrote it."""
