"""Large products come near the peak of every chip."""

from __future__ import annotations

import pytest

from bench import peak
from tpuflow.chips import CHIPS

NEAR = 0.9


@pytest.mark.parametrize("chip", CHIPS)
def test_a_product_of_bf16_is_near_the_peak(chip: str) -> None:
    assert NEAR <= peak.share(chip) <= 1
