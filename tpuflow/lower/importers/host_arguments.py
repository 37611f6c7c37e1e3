"""Arguments that lie in the host's memory when a program starts, which a Program does not have: said, not passed over."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from tpuflow.lower.operations.memories import HOST_KINDS


def warn_of_host_arguments(name: str, kinds: Iterable[str]) -> None:
    """Warn of arguments that are to lie at the host, by JAX's name of each one's memory, and lie in HBM."""
    found = [i for i, kind in enumerate(kinds) if kind in HOST_KINDS]
    if found:
        listed = ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")
        warnings.warn(
            f"{name}: {len(found)} argument{'s' * (len(found) > 1)} ({listed}) should be in the host's memory when the program starts; "
            "a Program has its arguments in HBM, and the peak counts them there: only what it puts at the host itself lies there.",
            UserWarning,
            stacklevel=3,
        )
