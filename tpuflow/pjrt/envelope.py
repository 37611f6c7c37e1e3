"""Serialised executables: the bytes of a .tpx file, with what only PJRT knows of it before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpuflow.errors import ProgramFileError

CACHE = "the compilation cache"
"""Where such bytes come from, for messages."""

_BEGIN = b"tpusim\x03"
_WORD_BYTES = 4
_WORDS = 3


@dataclass(frozen=True, slots=True)
class Own:
    """What only PJRT knows of a Program: the numbers of results that are planes of complex numbers; of those that are unreduced, so that
    each device has a summand of its own; and the module that each of several devices runs (StableHLO bytecode; none for one device)."""

    complex_outputs: Sequence[int] = ()
    unreduced_outputs: Sequence[int] = ()
    module: bytes = b""


def enveloped(own: Own, program: bytes) -> bytes:
    """First words of 32 bits: how many results are complex, how many unreduced, how many bytes the module has; which results these are;
    then the module and the Program."""
    sizes = (len(own.complex_outputs), len(own.unreduced_outputs), len(own.module))
    words = np.array([*sizes, *own.complex_outputs, *own.unreduced_outputs], "<u4")
    return _BEGIN + words.tobytes() + own.module + program


def opened(data: bytes) -> tuple[Own, bytes]:
    """What `enveloped` put together.

    Raises:
      ProgramFileError: another version of it did, or nothing of ours.
    """
    begin = len(_BEGIN) + _WORDS * _WORD_BYTES
    sizes = np.frombuffer(data[len(_BEGIN) : begin], "<u4").tolist() if data.startswith(_BEGIN) and len(data) >= begin else None
    if sizes is None or begin + _WORD_BYTES * sum(sizes[:2]) + sizes[2] > len(data):
        raise ProgramFileError(f"{CACHE}: no Program of this version of tpuflow; delete the cache's directory.")
    complex_count, unreduced_count, size = sizes
    end = begin + _WORD_BYTES * (complex_count + unreduced_count)
    numbers = np.frombuffer(data[begin:end], "<u4").tolist()
    return Own(numbers[:complex_count], numbers[complex_count:], data[end : end + size]), data[end + size :]
