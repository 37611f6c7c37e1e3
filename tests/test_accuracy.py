"""docs/accuracy.md and the fitted constants are what the stored model runs and the measured rows give."""

from __future__ import annotations

import pytest

from bench import accuracy
from tpuflow.chips import CHIPS
from tpuflow.device.timing import calibration_of
from tpuflow.device.timing.fits import FITS
from tpuflow.estimating.calibrating import FITTED, USUAL


@pytest.fixture(scope="module")
def found():
    """Fits, lines and other rows from the stored runs."""
    return accuracy.run(stored=True)


def test_the_page_is_up_to_date(found):
    assert accuracy.PAGE.read_text() == accuracy.page(*found), "run python -m bench.accuracy --stored"


def test_the_constants_are_some_that_a_fit_tries_and_their_errors_those_of_the_chips_calibrations(found):
    fits, _, _ = found
    for family, fit in fits.items():
        known = FITTED.get(family, USUAL)
        assert FITS[family].keys() == {*known.tried, "fit"}
        assert all(any(FITS[family][name] == pytest.approx(value, rel=1e-3) for value in values) for name, values in known.tried.items())
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
