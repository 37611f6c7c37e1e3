"""Types shared by operations and importers: bodies of regions, and the error for unsupported forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tpuflow.lower.graph.graph import Value

Body = Callable[..., Sequence[Value]]
"""A computation inside of an operation: `body(builder, *values)` makes its nodes with the builder it is given, and returns its results."""


class UnsupportedForm(Exception):
    """Raised by an operation or rule that does not support a form of its operation; the importer adds the user's source line."""
