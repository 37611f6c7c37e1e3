"""Compiling takes the same memory and gives the same amount of code however long the axes are: nothing has an entry for each position."""

from __future__ import annotations

import tracemalloc

import pytest

from tests.long_axes import OPERATIONS
from tpuflow.compiler import compile_function
from tpuflow.device.fast.engine import FastEngine
from tpuflow.device.timing import time_program
from tpuflow.isa.file import to_bytes
from tpuflow.isa.program import Program

SHORT, LONG = 10**5, 10**8
PEAK_BYTES = 8e6  # 0.3 to 3 MB are taken; one byte for each position would be 100
CODE_RATIO = 4  # tiles of a long axis are fewer and larger, or more in a loop: code differs, but not with the length


def _compiled(name: str, length: int) -> Program:
    function, arguments = OPERATIONS[name]
    return compile_function(function, arguments(length))


def _texts(program: Program) -> list[str]:
    """What is handed to XLA, in both fidelities."""
    return ["".join(t.as_text() for t in FastEngine(program, fidelity=how).translate()) for how in ("native", "bitexact")]


@pytest.mark.parametrize("name", OPERATIONS)
def test_nothing_that_compiles_depends_on_the_length_of_an_axis(name: str) -> None:
    short = _compiled(name, SHORT)
    translated = [len(text) for text in _texts(short)]
    tracemalloc.start()
    try:
        program = _compiled(name, LONG)
        time_program(program)
        texts = _texts(program)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < PEAK_BYTES
    assert len(to_bytes(program)) < CODE_RATIO * len(to_bytes(short))
    assert all(len(text) < CODE_RATIO * size for text, size in zip(texts, translated, strict=True))
