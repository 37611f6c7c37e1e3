"""`PJRT_Error`s made from Python's exceptions: a status code and a message."""

from __future__ import annotations

import traceback

from tpuflow.errors import (
    ConfigError,
    HostMemoryError,
    LaunchError,
    LimitError,
    OutOfMemoryError,
    ProgramFileError,
    TpuflowError,
    UnsupportedDtypeError,
    UnsupportedPrimitiveError,
)
from tpuflow.pjrt.cells import Text
from tpuflow.pjrt.handles import ApiObject
from tpuflow.pjrt.shutdown import ShutdownError


class Unimplemented(TpuflowError, NotImplementedError):
    """A part of PJRT's API that the simulated device does not implement."""


CODES: tuple[tuple[type[BaseException], int], ...] = (
    (OutOfMemoryError, 8),  # RESOURCE_EXHAUSTED
    (HostMemoryError, 8),
    (LimitError, 8),
    (MemoryError, 8),
    (UnsupportedPrimitiveError, 12),  # UNIMPLEMENTED
    (UnsupportedDtypeError, 12),
    (NotImplementedError, 12),
    (ConfigError, 3),  # INVALID_ARGUMENT
    (LaunchError, 3),
    (ProgramFileError, 15),  # DATA_LOSS
    (KeyboardInterrupt, 1),  # CANCELLED
    (ShutdownError, 1),
)
"""Exception type -> status code, by the first row that matches; any other exception is `INTERNAL`."""
INTERNAL = 13


class PjrtError(ApiObject):
    """A `PJRT_Error`, which lives until C destroys it. Header: code, message."""

    def __init__(self, error: BaseException):
        self._message = Text(_text(error))
        code = next((code for kind, code in CODES if isinstance(error, kind)), INTERNAL)
        super().__init__(code, *self._message.pair)


def _text(error: BaseException) -> str:
    """The message of an exception; of one that is a defect, with its traceback."""
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    if isinstance(error, TpuflowError | ShutdownError):
        return f"{error}{notes}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (Ctrl-C)"
    return "".join(traceback.format_exception(error)).strip()
