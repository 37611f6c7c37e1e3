"""Python's exceptions as PJRT errors: a code, and our text."""

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
from tpuflow.pjrt.ending import Ended
from tpuflow.pjrt.handles import ApiObject


class Unimplemented(TpuflowError, NotImplementedError):
    """Something of PJRT's that the simulated device does not do."""


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
    (Ended, 1),
)
"""The first row that an exception is of gives its code; all others are `INTERNAL`."""
INTERNAL = 13


class Failure(ApiObject):
    """An error as C sees it, until it destroys it. Header: code, message."""

    def __init__(self, error: BaseException):
        self._message = Text(_text(error))
        code = next((code for kind, code in CODES if isinstance(error, kind)), INTERNAL)
        super().__init__(code, *self._message.pair)


def _text(error: BaseException) -> str:
    """What it says; of an error that is not of ours also what kind it is and where it came from."""
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    if isinstance(error, TpuflowError | Ended):
        return f"{error}{notes}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (Ctrl-C)"
    return "".join(traceback.format_exception(error)).strip()
