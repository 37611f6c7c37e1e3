"""No modelled time is below its roofline, of any program: neither all of it nor one kernel's, with any constants that can be fitted."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cases import ROWS, Case, over_rows, sample
from tests.random_programs import RandomProgram, evaluate, random_programs
from tpuflow.chips import CHIPS
from tpuflow.compiler import compile_function
from tpuflow.device.timing import Calibration, time_program
from tpuflow.isa.program import Program

NAMES = sorted(CHIPS)
FASTEST = Calibration(kernel_seconds=0.0, step_seconds=0.0, hbm_share=1.0, matrix_share=1.0)
"""No other constants give shorter times: nothing goes by between kernels, and every peak is sustained."""


def _check(program: Program) -> None:
    """The time of a Program, and of each of its kernels, beside the matrix peak, HBM's and VMEM's, and beside what tpuflow has fitted."""
    fastest = time_program(program, calibration=FASTEST)
    assert fastest.roofline_seconds <= fastest.device_seconds <= time_program(program).device_seconds
    for row in fastest.kernels:
        assert row.time.work.roofline_seconds(fastest.machine) <= row.time.seconds, (row.place, row.time.name)
    chip, work = program.chip, fastest.work
    assert work.hbm_bytes / chip.hbm_bytes_per_second <= fastest.device_seconds
    for dtype, count in work.macs.items():
        assert 2 * count / chip.peak_flops(dtype) <= fastest.device_seconds


@over_rows(sample(23))
def test_no_operation_is_faster_than_its_roofline(case: Case) -> None:
    """On one chip, which another row does not have: all chips have their share of the table."""
    chip = CHIPS[NAMES[ROWS.index(case) % len(NAMES)]]
    _check(compile_function(case.fn, case.arguments(), name=case.name, chip=chip))


@pytest.mark.slow
@settings(max_examples=25, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
@given(random_programs(), st.sampled_from(NAMES))
def test_no_random_program_is_faster_than_its_roofline(program: RandomProgram, chip: str) -> None:
    _check(compile_function(lambda *xs: evaluate(program, *xs), program.arrays(), chip=chip))
