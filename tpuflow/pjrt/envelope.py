"""Serialised executables: the bytes of a .tpx file, with what only PJRT knows of it before them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpuflow.errors import ProgramFileError

CACHE = "the compilation cache"
"""Where such bytes come from, for messages."""

_BEGIN = b"tpusim\x04"
_WORD_BYTES = 4
_WORDS = 4


@dataclass(frozen=True, slots=True)
class Own:
    """What only PJRT knows of a Program: the numbers of results that are planes of complex numbers; of those that are tokens; of those that
    are stacked, so that each device has an array of its own; and the module that each of several devices runs (StableHLO bytecode; none
    for one device)."""

    complex_outputs: Sequence[int] = ()
    token_outputs: Sequence[int] = ()
    stacked_outputs: Sequence[int] = ()
    module: bytes = b""

    @property
    def numbered(self) -> tuple[Sequence[int], ...]:
        """What it says by the numbers of results."""
        return self.complex_outputs, self.token_outputs, self.stacked_outputs


def enveloped(own: Own, program: bytes) -> bytes:
    """First words of 32 bits: how many results are complex, how many tokens, how many stacked, how many bytes the module has; which
    results these are; then the module and the Program."""
    sizes = (*map(len, own.numbered), len(own.module))
    words = np.array([*sizes, *itertools.chain(*own.numbered)], "<u4")
    return _BEGIN + words.tobytes() + own.module + program


def opened(data: bytes) -> tuple[Own, bytes]:
    """What `enveloped` put together.

    Raises:
      ProgramFileError: another version of it did, or nothing of ours.
    """
    begin = len(_BEGIN) + _WORDS * _WORD_BYTES
    sizes = np.frombuffer(data[len(_BEGIN) : begin], "<u4").tolist() if data.startswith(_BEGIN) and len(data) >= begin else None
    if sizes is None or begin + _WORD_BYTES * sum(sizes[:-1]) + sizes[-1] > len(data):
        raise ProgramFileError(f"{CACHE}: no Program of this version of tpuflow; delete the cache's directory.")
    *counts, size = sizes
    end = begin + _WORD_BYTES * sum(counts)
    numbers = iter(np.frombuffer(data[begin:end], "<u4").tolist())
    complex_outputs, token_outputs, stacked_outputs = (list(itertools.islice(numbers, n)) for n in counts)
    return Own(complex_outputs, token_outputs, stacked_outputs, data[end : end + size]), data[end + size :]
