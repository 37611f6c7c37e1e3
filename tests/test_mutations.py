"""The bytes are what runs: a Program with one field changed gives both engines the same bits, or both the same error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests import programs
from tests.mutation import mutate
from tpuflow.device.runtime import Executable
from tpuflow.dtypes import DType
from tpuflow.errors import ProgramError, ProgramFileError
from tpuflow.isa.file import from_bytes, to_bytes
from tpuflow.isa.program import Program

MUTANTS = 300
MAKERS: tuple[Callable[[], Program], ...] = (
    programs.map_program, programs.in_place_program, programs.reduce_program, programs.matmul_program, programs.conv_program,
    programs.loop_program,
    programs.switch_program, programs.take_program, programs.scatter_program, programs.cumulative_program, programs.sort_program,
)  # fmt: skip


def _value(dtype: DType, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Small random numbers; indices and trip counts stay small."""
    if dtype.is_float:
        return np.asarray(rng.standard_normal(shape)).astype(dtype.numpy)
    return np.asarray(rng.integers(0, 2 if dtype.kind == "pred" else 5, shape)).astype(dtype.numpy)


def _outcome(program: Program, engine: str) -> tuple[str, object]:
    """("error", its text) of the verifier, or ("bits", the outputs' bytes)."""
    try:
        executable = Executable(program, engine=engine, fidelity="bitexact")
    except ProgramError as error:
        return "error", str(error)
    rng = np.random.default_rng(0)
    outputs, _ = executable.launch([_value(p.dtype, p.shape, rng) for p in program.inputs])
    return "bits", [np.asarray(x).tobytes() for x in outputs]


def _writable_mutant(program: Program, rng: np.random.Generator) -> tuple[Program, str]:
    """A changed Program as it comes back from its file (a field that cannot be written, like semaphore -1, is drawn again)."""
    while True:
        mutant, change = mutate(program, rng)
        try:
            return from_bytes(to_bytes(mutant)), change
        except ProgramFileError:
            continue


@pytest.mark.slow
@pytest.mark.parametrize("maker", MAKERS, ids=lambda m: m.__name__)
def test_a_program_with_one_field_changed_means_the_same_to_both_engines(maker: Callable[[], Program]) -> None:
    program = maker()
    rng = np.random.default_rng(len(maker.__name__))
    ran = 0
    for _ in range(MUTANTS // len(MAKERS)):
        mutant, change = _writable_mutant(program, rng)
        reference, fast = _outcome(mutant, "reference"), _outcome(mutant, "fast")
        assert reference == fast, change
        ran += reference[0] == "bits"
    assert ran, "no mutant was valid: the verifier refuses everything"
