"""Calibration: constants come back from times that were made with them, errors are honest, and too few rows are refused."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import linen

import tpuflow
from models.mlp import MLP
from tpuflow import cli
from tpuflow.chips import CHIPS, get_chip
from tpuflow.compiler import compile_function
from tpuflow.device.timing import Calibration, calibration, get_calibration, time_program
from tpuflow.device.timing.calibration import family_of
from tpuflow.device.timing.fits import FITS
from tpuflow.device.timing.program import sink_time
from tpuflow.errors import ConfigError
from tpuflow.estimating.calibrating import (
    FITTED,
    HBM_SHARE,
    INPUT_TRIED,
    USUAL,
    Curve,
    Fit,
    Measurement,
    curve,
    fit_curves,
    leave_one_model_out,
)
from tpuflow.isa.file import code_hash, from_bytes, save, to_bytes

KERNEL, SHARE = 5e-6, 0.75


def chain(batch: int):
    """A few kernels over an array of `batch` x `batch`."""

    def step(x: jax.Array) -> jax.Array:
        return jnp.cumsum(x @ x, 0) + x.T

    return step, jax.ShapeDtypeStruct((batch, batch), jnp.bfloat16)


def synthetic(model: str, base: float, moved: float, kernels: float, *, noise: float = 1.0) -> Curve:
    """A curve base + moved / share + kernels * kernel_seconds, measured at KERNEL and SHARE."""
    chip = get_chip("tpu-v3")
    times = tuple(base + moved / share for share in HBM_SHARE.modelled)
    return Curve(Measurement(model, model, chip, noise * (base + moved / SHARE + kernels * KERNEL)), times, (kernels,))


def curves(*, noise: float = 1.0) -> list[Curve]:
    """Three models, four rows each: launch-bound, memory-bound, and both."""
    parts = {"launch": (1e-6, 1e-5, 100.0), "memory": (1e-4, 1e-2, 10.0), "both": (1e-3, 1e-3, 200.0)}
    return [synthetic(m, b * n, v * n, k, noise=noise if m == "both" else 1.0) for m, (b, v, k) in parts.items() for n in (1, 2, 4, 8)]


def test_constants_come_back_from_times_made_with_them():
    found = fit_curves(curves())
    assert found.constants["kernel_seconds"] == pytest.approx(KERNEL, rel=0.05)
    assert found.constants["hbm_share"] == pytest.approx(SHARE, abs=0.02)
    assert found.median_error < 0.02 and found.left_out_error < 0.05 and found.rows == 12


def test_a_model_left_out_shows_its_own_error():
    errors = {c.measurement.model: e for c, e in leave_one_model_out(curves(noise=2.0))}
    assert abs(errors["both"]) == pytest.approx(0.5, abs=0.03)
    assert fit_curves(curves(noise=2.0)).left_out_error >= fit_curves(curves()).left_out_error


def test_rows_that_are_far_off_do_not_pull_on_the_constants():
    """A third of the rows are measured five times slower, as of other software; their constants would be others."""
    found = fit_curves(
        [*curves(), *(replace(c, measurement=replace(c.measurement, seconds=5 * c.measurement.seconds)) for c in curves()[:6])]
    )
    assert found.constants == fit_curves(curves()).constants


def test_a_family_with_three_constants_gets_them_back():
    true = {"step_seconds": 8e-4, "hbm_share": 0.7, "input_bytes_per_second": INPUT_TRIED[30]}
    rows = []
    for n in range(18):
        base, moved, made = 1e-3 * (n % 5), 1e-3 * (n % 7), 2e7 * (n % 4)
        times = tuple(base + moved / share for share in HBM_SHARE.modelled)
        row = Curve(Measurement(f"m{n % 3}", f"m{n % 3}", get_chip("ascend910"), 1.0), times, (1.0,), made, 1e-4)
        rows.append(replace(row, measurement=replace(row.measurement, seconds=row.seconds(true))))
    assert fit_curves(rows).constants == pytest.approx(true)
    with pytest.raises(ConfigError, match="17 rows for 3 constants .*step_seconds, hbm_share, input_bytes_per_second.* at least 18"):
        fit_curves(rows[:17])


def test_a_curve_tells_what_is_fed_from_a_step_that_takes_far_longer():
    """Eight numbers a step, for products of 2,048 x 2,048: 1 MB/s would hold up no step."""
    model = linen.Sequential([linen.Embed(8, 2048), linen.Dense(2048), linen.Dense(2)])
    batch = jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.int32)
    program = tpuflow.estimate_training(model, batch, chip="ascend910", sink_size=7).program
    times, _, input_bytes, outside = curve(program, 7)
    assert input_bytes == pytest.approx(8 * 4, rel=1e-6) and 8 * 4 / 1e6 < times[0] / 2 and 0 <= outside < times[0] / 2


def test_no_input_pipeline_is_slower_than_one_that_was_measured():
    """Where most rows were fed at half the rate of one: that one was fed as fast as it was."""
    rows, fast = [], INPUT_TRIED[50]
    for n in range(18):
        made, rate = 2e7 * (n + 1), fast if n == 4 else fast / 2
        times = tuple(1e-4 + 1e-4 * (n % 7) / share for share in HBM_SHARE.modelled)
        rows.append(Curve(Measurement(f"m{n % 3}", f"m{n % 3}", get_chip("ascend910"), made / rate), times, (1.0,), made))
    assert fit_curves(rows).constants["input_bytes_per_second"] == fast
    assert fit_curves([*rows[:4], *rows[5:], rows[0]]).constants["input_bytes_per_second"] == pytest.approx(fast / 2, rel=0.02)


@pytest.mark.parametrize("chip", ["ascend910", "tpu-v3"])
@pytest.mark.parametrize("rate", [1.0, 3e6, 1e12])
@pytest.mark.parametrize("rows", [2, 64])
def test_a_curve_has_the_time_that_the_model_has(chip: str, rate: float, rows: int):
    """Of a sunk training step, which waits for its data or does not, under any of the constants that are fitted for the chip."""
    batch = jax.ShapeDtypeStruct((rows, 28, 28), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    program = tpuflow.estimate_training(MLP(), batch, chip=chip, sink_size=7).program
    found = Curve(Measurement("mlp", "mlp", get_chip(chip), 1.0), *curve(program, 7))
    fitted = FITTED.get(get_chip(chip).family, USUAL).tried
    values = {"kernel_seconds": 3e-6, "step_seconds": 2e-4, "hbm_share": HBM_SHARE.modelled[1], "input_bytes_per_second": rate}
    constants = {name: value for name, value in values.items() if name in fitted}
    timed = sink_time(program, 7, calibration=Fit(constants, 0, 0, 0).calibration(get_chip(chip).family))
    assert found.seconds(constants) == pytest.approx(timed.seconds / 7, rel=1e-6)


def test_six_rows_are_needed_for_each_constant():
    with pytest.raises(ConfigError, match="11 rows for 2 constants .* at least 12"):
        fit_curves(curves()[:11])


def test_rows_of_one_model_say_nothing_of_another():
    rows = [replace(c, measurement=replace(c.measurement, model="mine")) for c in curves()]
    with pytest.raises(ConfigError, match="all 12 rows are of 'mine'; give rows of another model"):
        fit_curves(rows)


def test_every_time_says_on_which_chip_and_which_fit_it_stands(tmp_path: Path):
    found = Fit({"kernel_seconds": 2e-6, "hbm_share": 0.5}, 12, 0.1, 0.2).calibration("tpu")
    assert (found.kernel_seconds, found.hbm_share) == (2e-6, 0.5)
    says = "modelled on tpu-v3, fit to 12 measured rows, median error 10% (20% with a model left out)"
    estimate = tpuflow.estimate(*chain(64), chip="tpu-v3", calibration=found)
    compiled = tpuflow.jit(chain(64)[0], chip="tpu-v3").lower(chain(64)[1]).compile()
    timed = (compiled.time(found).summary(), compiled.profile(found).to_text(), compiled.executable.time(calibration=found).summary())
    assert all(says in text for text in (estimate.report(), *timed))
    assert estimate.as_dict()["fit"] == estimate.profile().as_dict()["fit"] == found.fit
    assert FITS["tpu"]["fit"] in compiled.time().summary(), "without one, what tpuflow has for the family"


def test_a_chip_has_no_constant_that_is_fitted():
    fitted = {f.name for f in fields(Calibration)} - {"family"}
    assert not fitted & {f.name for f in fields(tpuflow.Chip)}
    assert {name for constants in (USUAL, *FITTED.values()) for name in constants.tried} <= fitted


@pytest.mark.parametrize("chip", CHIPS)
def test_no_byte_of_a_program_depends_on_a_fit_and_its_time_does(chip: str, monkeypatch: pytest.MonkeyPatch):
    """A product whose steps cores share, pooling, a loop and a reduction, under constants that could not differ more."""

    def function(x: jax.Array) -> jax.Array:
        pooled = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (3, 3), (1, 1), "SAME")
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y) + jnp.cumsum(y, 0), pooled.T @ x).sum(0)

    x, row = jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16), get_chip(chip)
    first = compile_function(function, (x,), chip=chip)
    before = to_bytes(first), code_hash(first), time_program(first).picoseconds
    other = {"kernel_seconds": 1e-3, "step_seconds": 1e-1, "hbm_share": 0.01, "matrix_share": 0.01, "fit": "another fit"}
    monkeypatch.setattr(calibration, "FITS", {family_of(row): other})
    second = compile_function(function, (x,), chip=chip)
    assert (to_bytes(second), code_hash(second)) == before[:2]
    assert time_program(second).picoseconds > 2 * before[2] and "another fit" in time_program(second).provenance
    assert "another fit" in time_program(from_bytes(before[0])).provenance, "a saved Program is timed with today's constants"


def test_a_calibration_is_for_the_chips_of_its_family():
    for chip in (c for c in CHIPS.values() if c.family != "tpu"):
        with pytest.raises(ConfigError, match=f"family 'tpu'; '{chip.name}' is of '{family_of(chip)}'"):
            tpuflow.estimate(*chain(8), chip=chip, calibration=Calibration(family="tpu"))
    mine = replace(get_chip("generic"), name="mine")
    assert tpuflow.estimate(*chain(8), chip=mine, calibration=Calibration(family="mine", fit="measured")).time.calibration.fit == "measured"


BAD_CALIBRATIONS = {
    "a misspelt field": ("kernel_second = 1.0", "a calibration has no field 'kernel_second'. Did you mean 'kernel_seconds'"),
    "a text for a number": ('kernel_seconds = "1 us"', "kernel_seconds is '1 us'; expected a number"),
    "a negative number": ("hbm_share = -0.5", "not negative"),
    "more than a peak": ("matrix_share = 1.25", "matrix_share is 1.25; expected a share of the chip's peak, from 0 to 1"),
    "no number": ("step_seconds = nan", "finite"),
    "on no chip": ('base = "tpu-v33"', "base: unknown chip 'tpu-v33'. Did you mean 'tpu-v3'?"),
    "on a number": ("base = 3", "base: unknown chip '3'"),
    "no toml": ("kernel_seconds", "Give a readable TOML file with the fields of tpuflow.Calibration"),
}


def test_a_file_on_the_base_of_a_chip_says_only_what_differs(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "tpu-v3"\ninput_bytes_per_second = 250e6\n')
    own, found = calibration.calibration_of(get_chip("tpu-v3")), get_calibration(path)
    assert found == replace(own, input_bytes_per_second=250e6, fit=f"mine.toml, else {own.fit}")


@pytest.mark.parametrize("case", BAD_CALIBRATIONS)
def test_a_bad_calibration_file_is_explained(case: str, tmp_path: Path):
    text, message = BAD_CALIBRATIONS[case]
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.toml") as error:
        tpuflow.estimate(*chain(8), calibration=path)
    assert message in str(error.value)


def test_the_command_line_fits_a_csv_and_writes_a_calibration_that_estimates_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    true = Calibration(kernel_seconds=KERNEL, hbm_share=SHARE)
    rows = ["target,batch,chip,milliseconds,model"]
    for i, batch in enumerate((8, 64, 100, 256, 300, 512, 700, 1024, 1500, 2048, 3000, 4096)):
        seconds = tpuflow.estimate(*chain(batch), chip="tpu-v3", calibration=true).step_seconds
        rows.append(f"tests.test_calibrating:chain,{batch},tpu-v3,{seconds * 1e3},model {i % 3}")
    path = tmp_path / "measured.csv"
    path.write_text("\n".join(rows) + "\n")
    mine = str(tmp_path / "mine.toml")
    assert cli.main(["calibrate", str(path), "-o", mine]) == 0
    assert "median error" in capsys.readouterr().out
    fitted = get_calibration(mine)
    assert fitted.hbm_share == pytest.approx(SHARE, abs=0.05) and "12 measured rows" in fitted.fit and fitted.family == "tpu"
    target = "tests.test_calibrating:chain"
    assert cli.main(["estimate", target, "--chip", "tpu-v3", "tpu-v4", "generic", "--calibration", mine]) == 0
    out = capsys.readouterr().out
    assert out.count("12 measured rows") == 2 and "modelled on generic, uncalibrated" in out
    assert cli.main(["estimate", target, "--chip", "ascend910", "--calibration", mine]) == 2
    assert "for chips of the family 'tpu'; none of these is: ascend910 (ascend)" in capsys.readouterr().err
    assert cli.main(["estimate", target, "--chip", "tpu-v3", "--calibration", mine, mine]) == 2
    assert "another one was given for tpu-v3" in capsys.readouterr().err
    compile_and_save(tmp_path / "step.tpx")
    assert cli.main(["run", str(tmp_path / "step.tpx"), "--calibration", mine]) == 0
    assert "12 measured rows" in capsys.readouterr().err


def compile_and_save(path: Path) -> None:
    """A Program for a TPU without inputs."""
    save(compile_function(lambda: jnp.arange(8.0) * 2, (), chip="tpu-v3"), path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target,batch\n", "missing: target, batch, chip, milliseconds"),
        ("target,batch,chip\na:b,1,generic\n", "missing: milliseconds"),
        ("target,batch,chip,milliseconds\ntests.test_calibrating:chain,eight,generic,1\n", "row 1: invalid literal"),
        ("target,batch,chip,milliseconds\ntests.test_calibrating:chain,8,generic,0\n", "expected a positive number"),
        ("target,batch,chip,milliseconds\ntests.test_calibrating:chain,8,generic,1\n", "1 rows for 2 constants"),
        (
            "target,batch,chip,milliseconds\ntests.test_calibrating:chain,8,tpu-v3,1\ntests.test_calibrating:chain,8,ascend910,1\n",
            "chips of the families ascend, tpu",
        ),
    ],
)
def test_bad_measurements_are_explained(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    assert cli.main(["calibrate", str(path)]) == 2
    assert message in capsys.readouterr().err
