"""Serialised executables: the bytes of a .tpx file, with what only PJRT knows of it before them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from tpuflow.errors import ProgramFileError

CACHE = "the compilation cache"
"""Where such bytes come from, for messages."""

_BEGIN = b"tpusim\x02"
_WORD_BYTES = 4


def enveloped(complex_outputs: Collection[int], module: bytes, program: bytes) -> bytes:
    """First words of 32 bits: how many results are complex, which, how many bytes `module` has; then the module that each device of several
    runs (none for one device), and the Program."""
    words = np.array([len(complex_outputs), *sorted(complex_outputs), len(module)], "<u4")
    return _BEGIN + words.tobytes() + module + program


def opened(data: bytes) -> tuple[list[int], bytes, bytes]:
    """What `enveloped` put together.

    Raises:
      ProgramFileError: another version of it did, or nothing of ours.
    """
    begin = len(_BEGIN) + _WORD_BYTES
    count = int.from_bytes(data[len(_BEGIN) : begin], "little")
    end = begin + _WORD_BYTES * (count + 1)
    if not data.startswith(_BEGIN) or end > len(data):
        raise ProgramFileError(f"{CACHE}: no Program of this version of tpuflow; delete the cache's directory.")
    *complex_outputs, size = np.frombuffer(data[begin:end], "<u4").tolist()
    return complex_outputs, data[end : end + size], data[end + size :]
