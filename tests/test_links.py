"""The time of collectives over mesh axes that are parts of one row of chips."""

from __future__ import annotations

import pytest

from tpuflow.chips import get_chip
from tpuflow.chips.links import collective_seconds

CHIP = get_chip("tpu-v5e")
BYTES = 2**26
PARTS, JOINED = (4, 2), (False, True)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_all_parts_of_a_row_together_take_what_the_row_takes(kind: str) -> None:
    assert collective_seconds(CHIP, kind, BYTES, PARTS, (0, 1), joined=JOINED) == collective_seconds(CHIP, kind, BYTES, (8,), (0,))
    beside = collective_seconds(CHIP, kind, BYTES, (2, *PARTS), (1, 2), joined=(False, *JOINED))
    assert beside == collective_seconds(CHIP, kind, BYTES, (2, 8), (1,))


def test_rings_along_a_part_share_the_links_between_their_chips_or_have_no_way_back() -> None:
    whole = {size: collective_seconds(CHIP, "all_reduce", BYTES, (size,), (0,)) for size in (2, 4)}
    outer, inner = (collective_seconds(CHIP, "all_reduce", BYTES, PARTS, (a,), joined=JOINED) for a in (0, 1))
    assert outer == pytest.approx(2 * whole[4], rel=1e-2)  # each link carries two rings
    assert inner == pytest.approx(2 * whole[2], rel=1e-2)  # one direction only
    middle = collective_seconds(CHIP, "all_reduce", BYTES, (2, 2, 2), (1,), joined=(False, True, True))
    assert middle == pytest.approx(4 * whole[2], rel=1e-2)  # both


def test_axes_that_are_no_parts_of_a_row_have_links_of_their_own() -> None:
    apart = collective_seconds(CHIP, "all_reduce", BYTES, PARTS, (1,))
    assert apart < collective_seconds(CHIP, "all_reduce", BYTES, PARTS, (1,), joined=(False, True)) * 1.01
    assert apart == collective_seconds(CHIP, "all_reduce", BYTES, PARTS, (1,), joined=(False, False))
