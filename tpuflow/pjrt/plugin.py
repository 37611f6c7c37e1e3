"""Registration with JAX, and the end of the process."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

from tpuflow.jaxprs.plugins import lower_as_for_tpus, lower_host_calls
from tpuflow.jaxprs.plugins import register as register_with_jax
from tpuflow.pjrt.entries import buffers, clients, devices, executables  # noqa: F401  (what they import is what there is)
from tpuflow.pjrt.loading import HOST_FUNCTIONS
from tpuflow.pjrt.table import TABLES, Table


def register(name: str, priority: int) -> None:
    """Register the device as a backend of JAX's, once."""
    if TABLES:
        return
    table = Table()
    register_with_jax(name, table.address, priority)
    lower_host_calls(name, _enlist)
    lower_as_for_tpus(name)
    atexit.register(table.retire)


def _enlist(function: Callable[..., Any]) -> int:
    """The number of a function that programs call."""
    with _enlisting:
        HOST_FUNCTIONS.append(function)
        return len(HOST_FUNCTIONS) - 1


_enlisting = threading.Lock()
