"""docs/accuracy.md and the fitted constants are what the stored model runs and the measured rows give."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from bench import accuracy
from bench.gradients import ready, sums
from tpuflow.chips import CHIPS, get_chip
from tpuflow.chips.fits import FITS
from tpuflow.chips.links import all_reduce_seconds
from tpuflow.compiler import compile_function
from tpuflow.device.timing import time_program


@pytest.fixture(scope="module")
def found():
    """Fits, lines and other rows from the stored runs."""
    return accuracy.run(stored=True)


def test_the_page_is_up_to_date(found):
    assert accuracy.PAGE.read_text() == accuracy.page(*found), "run python -m bench.accuracy --fit"


def test_the_fitted_constants_are_in_the_chips_rows(found):
    fits, _, _ = found
    for family, fit in fits.items():
        assert {name: FITS[family][name] for name in fit.constants} == pytest.approx(fit.constants, rel=1e-3)
        assert all(c.fit == fit.text for c in CHIPS.values() if c.family == family)
    assert all(c.fit == "uncalibrated" for c in CHIPS.values() if c.family not in fits)


def test_no_row_is_hidden(found):
    _, lines, others = found
    with accuracy.ROWS.open() as file:
        rows = sum(1 for _ in file) - 1
    assert len(lines) + len(others) == rows
    page = accuracy.page(*found)
    assert all(f"| {line.row['id']} |" in page for line in lines)


def test_there_are_six_rows_for_every_constant(found):
    fits, _, _ = found
    assert all(fit.rows >= 6 * len(fit.constants) for fit in fits.values())


def test_a_gradient_is_ready_when_the_backward_pass_stores_it_and_the_rest_come_last():
    shapes = ((8, 16), (16, 4))

    def loss(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]))

    w, x = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes], jax.ShapeDtypeStruct((32, 8), jnp.float32)
    program = compile_function(jax.grad(loss), (w, x), chip=get_chip("generic"))
    found = ready(program, time_program(program), (*shapes, (5, 5)))
    assert [size for size, _ in found] == [4 * 16 * 4, 4 * 8 * 16, 4 * 25]
    assert [ahead > 0 for _, ahead in found] == [True, False, False]


def test_sums_are_split_where_they_are_told_and_keep_every_byte():
    chip, gradients = get_chip("ascend910"), ((400, 0.5), (300, 0.4), (200, 0.1), (100, 0.0))
    split = sums(gradients, (1, 3), chip, 8)
    assert [ahead for _, ahead in split] == [0.5, 0.1, 0.0]
    assert [s for s, _ in split] == [all_reduce_seconds(chip, n, 8) for n in (400, 500, 100)]
    assert sums(gradients, (), chip, 8) == ((all_reduce_seconds(chip, 1000, 8), 0.0),)
