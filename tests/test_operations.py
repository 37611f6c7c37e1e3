"""Every row of the one table of operations, and its gradient, judged by every engine, by text and back, and by jax.jit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import ROWS, Case, sample
from tpuflow.compiler import compile_function
from tpuflow.device.runtime import Executable
from tpuflow.isa.assembler import assemble
from tpuflow.isa.disassembler import disassemble
from tpuflow.isa.program import Program

SAMPLE = sample(17)


def _words(x: Any) -> np.ndarray:
    """An array, or the words of random keys."""
    is_key = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def _run(program: Program, arrays: list[np.ndarray], engine: str, fidelity: str) -> tuple[np.ndarray, ...]:
    outputs, _ = Executable(program, engine=engine, fidelity=fidelity).launch(arrays)
    return tuple(np.asarray(x) for x in outputs)


def _judge(case: Case) -> None:
    arguments = case.arguments()
    program = compile_function(case.fn, arguments, name=case.name)
    arrays = [_words(x) for x in jax.tree.leaves(arguments)]
    reference = _run(program, arrays, "reference", "bitexact")
    from_text = assemble(disassemble(program.strip()))
    exact = _run(from_text, arrays, "fast", "bitexact")
    for a, b in zip(reference, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.tobytes() == b.tobytes(), f"bits differ in {np.sum(a != b)} places: {a[a != b][:4]} and {b[a != b][:4]}"
    case.check(reference)
    case.check(_run(program, arrays, "fast", "native"))


@pytest.mark.parametrize("case", SAMPLE, ids=lambda c: c.name)
def test_a_sample_of_rows_means_the_same_everywhere(case: Case) -> None:
    _judge(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in ROWS if c not in SAMPLE], ids=lambda c: c.name)
def test_every_row_means_the_same_everywhere(case: Case) -> None:
    _judge(case)
