"""Large products come near the peak of every chip whose row lets them."""

from __future__ import annotations

import pytest

from bench import peak
from tpuflow.chips import CHIPS

NEAR = 0.9
OPEN = ("ascend910", "tpu-v6e")
"""Chips whose products miss it, as docs/peak.md says why: work left for the compiler. That they come to hold it is told, too."""
ROWS = [
    pytest.param(chip, marks=pytest.mark.xfail(strict=True, reason="HBM bounds their tiles: docs/peak.md")) if chip in OPEN else chip
    for chip in CHIPS
]


@pytest.mark.parametrize("chip", ROWS)
def test_a_product_of_bf16_is_near_the_peak_or_near_what_its_chip_allows(chip: str) -> None:
    share, bound = peak.share(chip), peak.bound(CHIPS[chip])
    assert share <= bound
    assert share >= NEAR * bound


def test_only_the_ascend_910_is_bound_by_its_row() -> None:
    assert [name for name, chip in CHIPS.items() if peak.bound(chip) < NEAR] == ["ascend910"]
