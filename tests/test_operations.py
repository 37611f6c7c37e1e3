"""Every row of the one table of operations, and its gradient, judged by every engine, by text and back, and by jax.jit."""

from __future__ import annotations

import jax
import numpy as np

from tests.cases import Case, over_rows, sample, words
from tpuflow.compiler import compile_function
from tpuflow.device.runtime import Executable
from tpuflow.isa.assembler import assemble
from tpuflow.isa.disassembler import disassemble
from tpuflow.isa.program import Program


def _run(program: Program, arrays: list[np.ndarray], engine: str, fidelity: str) -> tuple[np.ndarray, ...]:
    outputs, _ = Executable(program, engine=engine, fidelity=fidelity).launch(arrays)
    return tuple(np.asarray(x) for x in outputs)


@over_rows(sample(17))
def test_every_row_means_the_same_everywhere(case: Case) -> None:
    arguments = case.arguments()
    program = compile_function(case.fn, arguments, name=case.name)
    arrays = [words(x) for x in jax.tree.leaves(arguments)]
    reference = _run(program, arrays, "reference", "bitexact")
    from_text = assemble(disassemble(program.strip()))
    exact = _run(from_text, arrays, "fast", "bitexact")
    for a, b in zip(reference, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.tobytes() == b.tobytes(), f"bits differ in {np.sum(a != b)} places: {a[a != b][:4]} and {b[a != b][:4]}"
    case.check(reference)
    case.check(_run(program, arrays, "fast", "native"))
