"""Chip rows: their peaks are the published ones, sources are given, and users bring their own in TOML or Python."""

from __future__ import annotations

from pathlib import Path

import pytest

import tpuflow
from tpuflow.chips import CHIPS, Chip, get_chip
from tpuflow.chips.links import collective_seconds
from tpuflow.errors import ConfigError

PUBLISHED = {  # matrix peak in TFLOP/s of 16-bit floats, HBM in GB/s: makers' data sheets
    "ascend910": (256, 1200),
    "bm1684x": (16, 68),
    "bm1690": (128, 546),
    "tpu-v2": (46, 716),
    "tpu-v3": (123, 900),
    "tpu-v4": (275, 1230),
    "tpu-v5e": (197, 819),
    "tpu-v5p": (459, 2765),
    "tpu-v6e": (918, 1640),
    "tpu-v7x": (2307, 7380),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_row_has_the_published_peaks(name: str):
    matrix, memory = PUBLISHED[name]
    chip = get_chip(name)
    assert chip.peak_flops("f16") / 1e12 == pytest.approx(matrix, rel=0.03)
    assert chip.hbm_bytes_per_second / 1e9 == pytest.approx(memory, rel=0.01)


def test_every_row_says_where_its_numbers_are_from():
    assert set(PUBLISHED) | {"generic"} == set(CHIPS)
    for chip in CHIPS.values():
        assert "assumed" in chip.source


def test_the_ascend_910_has_the_documented_memory_division():
    chip = get_chip("ascend910")
    gib = 2**30
    assert (chip.hbm_parameter_bytes, chip.hbm_feature_bytes, chip.hbm_collective_bytes) == (5 * gib, 26 * gib, gib)
    assert chip.available_hbm_bytes == 31 * gib
    assert chip.core_hbm_bytes_per_second == 128e9 and chip.cores == 32


def test_full_f32_products_cost_what_the_chip_has_for_them():
    assert get_chip("generic").matrix_passes("f32") == 1 and get_chip("generic").matrix_f32_as == "f32"
    assert get_chip("bm1690").peak_flops("f32") / 1e12 == pytest.approx(16, rel=0.03)
    assert get_chip("tpu-v4").matrix_f32_as == "bf16" and get_chip("ascend910").matrix_f32_as == "f16"


def test_products_of_wide_integers_cost_those_of_their_bytes_and_unknown_types_are_refused():
    chip = get_chip("tpu-v5e")
    assert [chip.matrix_passes(t) / chip.matrix_passes("s8") for t in ("u8", "s16", "u32")] == [1, 3, 10]
    with pytest.raises(ValueError, match="tpu-v5e has no matrix products of c64; expected one of f32, f16"):
        chip.matrix_passes("c64")


def test_a_chip_of_ones_own_in_toml(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "tpu-v4"\nhbm_bytes_per_second = 3_000_000_000_000\ncores = 1\n')
    chip = tpuflow.get_chip(str(path))
    assert (chip.name, chip.cores, chip.hbm_bytes_per_second) == ("mine", 1, 3e12)
    assert isinstance(chip.hbm_bytes_per_second, float) and chip.matrix_units == 4
    assert get_chip(path) == chip and get_chip(chip) is chip


BAD_FILES = {
    "a misspelt field": ('base = "generic"\nclock_hertz = 1', "has no field 'clock_hertz'. Did you mean 'clock_hz'"),
    "an unknown base": ('base = "tpu-v44"', "unknown chip 'tpu-v44'. Did you mean 'tpu-v4'"),
    "a text for a number": ('base = "generic"\ncores = "two"', "cores is 'two'; expected an integer"),
    "a flag for a number": ('base = "generic"\ncores = true', "cores is True"),
    "a negative number": ('base = "generic"\ncores = -1', "not negative"),
    "no number": ('base = "generic"\nclock_hz = nan', "not negative"),
    "no end": ('base = "generic"\nclock_hz = inf', "finite"),
    "too little": ("cores = 2", "lacks acc_bytes"),
    "a fitted constant": ('base = "generic"\nkernel_seconds = 1e-6', "belong in a calibration's file"),
    "no toml": ("cores ==", "Give a readable TOML file"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_chip_file_is_explained(case: str, tmp_path: Path):
    text, message = BAD_FILES[case]
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        get_chip(path)
    assert message in str(error.value)


def test_a_chip_file_that_is_not_there_is_explained(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.toml"):
        get_chip(tmp_path / "none.toml")


def _sum_seconds(chip: Chip, data_bytes: float, chips: int) -> float:
    return collective_seconds(chip, "all_reduce", data_bytes, (chips,), (0,))


def test_one_chip_sums_nothing():
    assert all(_sum_seconds(chip, 1e9, 1) == 0.0 for chip in CHIPS.values())


def test_a_sum_over_a_torus_takes_two_passes_at_the_bandwidth_of_all_links():
    chip = get_chip("tpu-v4")  # six links of 0.9 * 45 GB/s; 512 chips are a cube of 8: three rings of 8 steps; 3 us to begin and end
    assert _sum_seconds(chip, 1e9, 512) == pytest.approx(2 * 511 / 512 * 1e9 / 243e9 + 3 * 8 * 1e-6 + 3e-6)


def test_a_sum_over_hosts_goes_through_meshes_hosts_and_the_network():
    chip = get_chip("ascend910")  # 4 by HCCS at 90 GB/s, 2 such by PCIe at 32, 2 hosts by the network at 12.5, each with what is left
    wire = 2 * 3 / 4 * 1e9 / 90e9 + 1e9 / 4 / 32e9 + 1e9 / 8 / 12.5e9
    assert _sum_seconds(chip, 1e9, 16) == pytest.approx(wire + (4 + 2 + 2) * 1e-6)


@pytest.mark.parametrize("chips", [2, 3, 7, 8, 64, 100, 4096, 20_000])
def test_a_sum_takes_longer_over_more_chips_and_more_data(chips: int):
    for name in ("ascend910", "tpu-v3", "tpu-v4", "tpu-v5e"):
        chip = get_chip(name)
        assert _sum_seconds(chip, 1e9, chips) >= _sum_seconds(chip, 1e9, chips - 1)
        assert _sum_seconds(chip, 2e9, chips) > _sum_seconds(chip, 1e9, chips)


def test_chips_that_nothing_joins_are_refused():
    with pytest.raises(ConfigError, match="'bm1690' does not say what joins the 2 chips"):
        _sum_seconds(get_chip("bm1690"), 1e9, 2)
