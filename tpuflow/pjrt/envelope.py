"""The format of serialised PJRT executables: the bytes of a .tpx file after a header with PJRT's own metadata."""

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
class ProgramMetadata:
    """What PJRT needs to know of a Program and its .tpx file does not say.

    complex_outputs, token_outputs, stacked_outputs: the indices of the results that are planes of a complex array; that are tokens; that
    are stacked along a first axis, one array a device. module: the StableHLO bytecode that each of several devices runs; b"" for one.
    """

    complex_outputs: Sequence[int] = ()
    token_outputs: Sequence[int] = ()
    stacked_outputs: Sequence[int] = ()
    module: bytes = b""

    @property
    def output_indices(self) -> tuple[Sequence[int], ...]:
        """The three lists of indices of results, in their order in the header."""
        return self.complex_outputs, self.token_outputs, self.stacked_outputs


def pack(metadata: ProgramMetadata, program: bytes) -> bytes:
    """The serialised executable: a magic number; words of 32 bits with the lengths of the three lists of indices and of the module, then
    the indices; the module; the Program."""
    sizes = (*map(len, metadata.output_indices), len(metadata.module))
    words = np.array([*sizes, *itertools.chain(*metadata.output_indices)], "<u4")
    return _BEGIN + words.tobytes() + metadata.module + program


def unpack(data: bytes) -> tuple[ProgramMetadata, bytes]:
    """The inverse of `pack`.

    Raises:
      ProgramFileError: the bytes are of another version, or not from `pack`.
    """
    begin = len(_BEGIN) + _WORDS * _WORD_BYTES
    sizes = np.frombuffer(data[len(_BEGIN) : begin], "<u4").tolist() if data.startswith(_BEGIN) and len(data) >= begin else None
    if sizes is None or begin + _WORD_BYTES * sum(sizes[:-1]) + sizes[-1] > len(data):
        raise ProgramFileError(f"{CACHE}: no Program of this version of tpuflow; delete the cache's directory.")
    *counts, size = sizes
    end = begin + _WORD_BYTES * sum(counts)
    numbers = iter(np.frombuffer(data[begin:end], "<u4").tolist())
    complex_outputs, token_outputs, stacked_outputs = (list(itertools.islice(numbers, n)) for n in counts)
    return ProgramMetadata(complex_outputs, token_outputs, stacked_outputs, data[end : end + size]), data[end + size :]
