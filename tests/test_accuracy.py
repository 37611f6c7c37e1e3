"""docs/accuracy.md and the fitted constants are what the stored model runs and the measured rows give."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

from bench import accuracy
from bench.gradients import Ready, gradient_program, ready, sums
from tpuflow.chips import CHIPS, get_chip
from tpuflow.chips.links import all_reduce_seconds
from tpuflow.device.timing import calibration_of
from tpuflow.device.timing.fits import FITS
from tpuflow.training.config import StepConfig


@pytest.fixture(scope="module")
def found():
    """Fits, lines and other rows from the stored runs."""
    return accuracy.run(stored=True)


def test_the_page_is_up_to_date(found):
    assert accuracy.PAGE.read_text() == accuracy.page(*found), "run python -m bench.accuracy --fit"


def test_the_fitted_constants_are_the_chips_calibrations(found):
    fits, _, _ = found
    for family, fit in fits.items():
        assert {name: FITS[family][name] for name in fit.constants} == pytest.approx(fit.constants, rel=1e-3)
        assert all(calibration_of(c).fit == fit.text for c in CHIPS.values() if c.family == family)
    assert all(calibration_of(c).fit == "uncalibrated" for c in CHIPS.values() if c.family not in fits)


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


def gradients_of(model: nn.Module) -> tuple[Ready, ...]:
    """When the gradients of a model [32, 8] -> [32, 4] are ready."""
    x, labels, chip = jax.ShapeDtypeStruct((32, 8), jnp.float32), jax.ShapeDtypeStruct((32,), jnp.int32), get_chip("generic")
    return ready(gradient_program(StepConfig(model, (x, labels), "O2", optax.sgd(0.1)), chip))


class Tower(nn.Module):
    """Two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """[B, 8] -> [B, 4]."""
        return nn.Dense(4, name="upper")(nn.tanh(nn.Dense(16, name="lower")(x)))


def test_gradients_are_ready_in_the_order_in_which_the_backward_pass_makes_them():
    found = gradients_of(Tower())
    assert {size for size, _ in found[:2]} == {4 * 4, 4 * 16 * 4}
    assert {size for size, _ in found[2:]} == {4 * 16, 4 * 8 * 16}
    assert found[-1][1] == 0.0 and found[1][1] > found[2][1]
    assert [ahead for _, ahead in found] == sorted((ahead for _, ahead in found), reverse=True)


class Twins(nn.Module):
    """Two dense layers side by side."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """[B, 8] -> [B, 4]."""
        return nn.Dense(4)(x) + nn.Dense(4)(x)


def test_gradients_that_are_one_value_are_ready_together():
    found = gradients_of(Twins())
    assert [size for size, _ in found] in ([16, 16, 128, 128], [128, 128, 16, 16])
    assert len({ahead for _, ahead in found}) == 2


def test_sums_are_split_where_they_are_told_and_keep_every_byte():
    chip, gradients = get_chip("ascend910"), ((400, 0.5), (300, 0.4), (200, 0.1), (100, 0.0))
    split = sums(gradients, (1, 3), chip, 8)
    assert [ahead for _, ahead in split] == [0.5, 0.1, 0.0]
    assert [s for s, _ in split] == [all_reduce_seconds(chip, n, 8) for n in (400, 500, 100)]
    assert sums(gradients, (), chip, 8) == ((all_reduce_seconds(chip, 1000, 8), 0.0),)
