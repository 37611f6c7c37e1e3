"""The time of collectives over mesh axes that are parts of one row of chips."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tpuflow.chips import get_chip
from tpuflow.chips.links import collective_seconds, sending_seconds

OPEN = get_chip("tpu-v5e")
CHIP = replace(OPEN, link_ring_chips=1)  # every axis closes
BYTES = 2**30
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


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_a_row_that_does_not_close_takes_twice_the_time_of_a_ring(kind: str) -> None:
    ring, row = (collective_seconds(chip, kind, BYTES, (8,), (0,)) for chip in (CHIP, OPEN))
    assert row == pytest.approx(2 * ring, rel=1e-2)
    closed = collective_seconds(OPEN, kind, BYTES, (16, 16), (1,))
    assert closed == collective_seconds(CHIP, kind, BYTES, (16, 16), (1,))


def test_a_message_to_the_next_chip_needs_no_ring() -> None:
    assert collective_seconds(OPEN, "permute", BYTES, (8,), (0,)) == collective_seconds(CHIP, "permute", BYTES, (8,), (0,))


def test_parts_of_a_row_that_does_not_close_lose_no_way_back() -> None:
    whole = collective_seconds(OPEN, "all_reduce", BYTES, (2,), (0,))
    assert collective_seconds(OPEN, "all_reduce", BYTES, PARTS, (1,), joined=JOINED) == pytest.approx(whole, rel=1e-2)


def test_an_axis_over_the_network_takes_no_links_from_the_others() -> None:
    assert collective_seconds(OPEN, "all_gather", BYTES, (4, 256), (1,)) == collective_seconds(OPEN, "all_gather", BYTES, (256,), (0,))


MESHES = [
    ("tpu-v5e", (16, 16)),
    ("tpu-v5e", (4, 256)),
    ("tpu-v5e", (2, 8, 32)),
    ("tpu-v4", (1024, 4)),
    ("ascend910", (8, 8)),
    ("tpu-v3", (64, 2)),
]


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize(("chip", "sizes"), MESHES)
def test_a_collective_over_all_axes_takes_what_a_row_of_as_many_chips_takes(chip: str, sizes: tuple[int, ...], kind: str) -> None:
    row, axes = get_chip(chip), tuple(range(len(sizes)))
    whole = collective_seconds(row, kind, BYTES, (math.prod(sizes),), (0,))
    assert collective_seconds(row, kind, BYTES, sizes, axes) == pytest.approx(whole)
    assert collective_seconds(row, kind, BYTES, sizes, axes[::-1]) == pytest.approx(whole)


@pytest.mark.parametrize(("chip", "sizes"), MESHES)
def test_gathering_takes_what_scattering_its_result_takes_whatever_joins_the_chips(chip: str, sizes: tuple[int, ...]) -> None:
    """Between hosts and slices as well: of what others have, every host takes each part once, and its chips share it by their links."""
    row = get_chip(chip)
    for axes in ((0,), (len(sizes) - 1,), tuple(range(len(sizes)))):
        chips = math.prod(sizes[a] for a in axes)
        gathered = collective_seconds(row, "all_gather", BYTES / chips, sizes, axes)
        assert gathered == pytest.approx(collective_seconds(row, "reduce_scatter", BYTES, sizes, axes))


@pytest.mark.parametrize(("chip", "sizes", "hops"), [("tpu-v4", (512, 4), 12), ("tpu-v4", (16, 16), 8), ("tpu-v3", (1024, 4), 32)])
def test_an_axis_that_is_longer_than_the_torus_is_wide_goes_on_along_the_next(chip: str, sizes: tuple[int, int], hops: int) -> None:
    """512 chips of a torus of 16x16x16 are 8x8x8, not a ring of 512; 16 go around one axis."""
    row = get_chip(chip)
    latency = collective_seconds(row, "all_reduce", 1e-9, sizes, (0,)) - row.collective_seconds
    assert latency == pytest.approx(2 * hops * row.hop_seconds)


def test_a_collective_has_the_links_to_itself_for_its_bytes_alone() -> None:
    nothing, something = (sending_seconds(CHIP, "all_gather", size, (8,), (0,)) for size in (0, BYTES))
    assert nothing == 0.0 and something == pytest.approx(7 * BYTES / 0.9 / 180e9)


# Published times of collectives: bench/several_chips.py compares all of them.
def test_a_gather_over_a_row_of_four_is_near_what_the_scaling_book_measured() -> None:
    assert collective_seconds(OPEN, "all_gather", 512 * 8192 * 2, (8, 4), (1,)) == pytest.approx(680e-6, rel=0.2)
    assert collective_seconds(OPEN, "all_gather", 64 * 256 * 2, (8, 4), (1,)) == pytest.approx(8e-6, rel=0.2)
