"""Calibration: constants come back from times that were made with them, errors are honest, and too few rows are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import tpuflow
from tpuflow import cli
from tpuflow.api.calibrating import KERNEL_TRIED, PATCH_CYCLES, TRAFFIC_SHARE, Curve, Fit, Measurement, fit_curves, leave_one_model_out
from tpuflow.chips import get_chip
from tpuflow.compiler import compile_function
from tpuflow.errors import ConfigError

KERNEL, SHARE = 5e-6, 0.6


def chain(batch: int):
    """A few kernels over an array of `batch` x `batch`."""

    def step(x: jax.Array) -> jax.Array:
        return jnp.cumsum(x @ x, 0) + x.T

    return step, jax.ShapeDtypeStruct((batch, batch), jnp.bfloat16)


def synthetic(model: str, base: float, moved: float, kernels: float, *, noise: float = 1.0) -> Curve:
    """A curve base + moved * share + kernels * kernel_seconds, measured at KERNEL and SHARE."""
    chip = get_chip("tpu-v3")
    times = tuple(base + moved * t for t in TRAFFIC_SHARE.modelled)
    return Curve(Measurement(model, model, chip, noise * (base + moved * SHARE + kernels * KERNEL)), times, (kernels,))


def curves(*, noise: float = 1.0) -> list[Curve]:
    """Three models, four rows each: launch-bound, memory-bound, and both."""
    parts = {"launch": (1e-6, 1e-5, 100.0), "memory": (1e-4, 1e-2, 10.0), "both": (1e-3, 1e-3, 200.0)}
    return [synthetic(m, b * n, v * n, k, noise=noise if m == "both" else 1.0) for m, (b, v, k) in parts.items() for n in (1, 2, 4, 8)]


def test_constants_come_back_from_times_made_with_them():
    found = fit_curves(curves())
    assert found.constants["kernel_seconds"] == pytest.approx(KERNEL, rel=0.05)
    assert found.constants["traffic_share"] == pytest.approx(SHARE, abs=0.02)
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
    true = {"kernel_seconds": KERNEL_TRIED[40], "step_seconds": 8e-4, "patch_cycles": 30.0}
    rows = []
    for n in range(18):
        base, patches, kernels = 1e-3 * (n % 5), 1e-4 * (n % 7), 50.0 * (n % 4) + 5.0
        times = tuple(base + patches * p for p in PATCH_CYCLES.modelled)
        row = Curve(Measurement(f"m{n % 3}", f"m{n % 3}", get_chip("ascend910"), 1.0), times, (kernels, 1.0))
        rows.append(replace(row, measurement=replace(row.measurement, seconds=row.seconds(true))))
    assert fit_curves(rows).constants == pytest.approx(true)
    with pytest.raises(ConfigError, match="17 rows for 3 constants .*kernel_seconds, step_seconds, patch_cycles.* at least 18"):
        fit_curves(rows[:17])


def test_six_rows_are_needed_for_each_constant():
    with pytest.raises(ConfigError, match="11 rows for 2 constants .* at least 12"):
        fit_curves(curves()[:11])


def test_a_fitted_chip_says_what_it_was_fitted_to():
    chip = Fit({"kernel_seconds": 2e-6, "traffic_share": 0.5}, 12, 0.1, 0.2).applied(get_chip("tpu-v3"))
    assert (chip.kernel_seconds, chip.traffic_share) == (2e-6, 0.5)
    assert "fit to 12 measured rows, median error 10% (20% with a model left out)" in tpuflow.estimate(*chain(64), chip=chip).report()


def test_a_new_fit_does_not_change_the_compiled_program():
    product, x = lambda x: jnp.tanh(x.T @ x), jax.ShapeDtypeStruct((25088, 512), jnp.bfloat16)  # long enough for cores to share steps
    chip = get_chip("ascend910")
    other = replace(chip, kernel_seconds=1e-7, step_seconds=1e-3, traffic_share=0.1, patch_cycles=50.0)
    one, two = (compile_function(product, (x,), chip=c) for c in (chip, other))
    assert one.code == two.code and one.chip != two.chip


def test_the_command_line_fits_a_csv_and_writes_chip_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    true = replace(get_chip("tpu-v3"), kernel_seconds=KERNEL, traffic_share=SHARE)
    rows = ["target,batch,chip,milliseconds,model"]
    for i, batch in enumerate((8, 64, 100, 256, 300, 512, 700, 1024, 1500, 2048, 3000, 4096)):
        seconds = tpuflow.estimate(*chain(batch), chip=true).step_seconds
        rows.append(f"tests.test_calibrating:chain,{batch},tpu-v3,{seconds * 1e3},model {i % 3}")
    path = tmp_path / "measured.csv"
    path.write_text("\n".join(rows) + "\n")
    assert cli.main(["calibrate", str(path), "-o", str(tmp_path / "chips")]) == 0
    assert "median error" in capsys.readouterr().out
    fitted = get_chip(tmp_path / "chips" / "tpu-v3-fitted.toml")
    assert fitted.traffic_share == pytest.approx(SHARE, abs=0.05) and "12 measured rows" in fitted.fit


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
