"""`tpuflow doctor`, `tpuflow chips` and `tpuflow --version`: what is there, whether it works, and what to do where it does not."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

from tpuflow import __version__, cli, doctor
from tpuflow.chips import CHIPS
from tpuflow.device.runtime import Executable
from tpuflow.doctor import FAIL, OK, WARN, Requirement


def findings(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit status, and (status, text with advice) of every subject, as the command gives them."""
    status = cli.main(["doctor", "--json"])
    return status, {f["subject"]: (f["status"], f"{f['text']}; {f['advice']}") for f in json.loads(capsys.readouterr().out)}


def test_what_these_tests_run_on_is_fit_for_tpuflow(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for subject in ("python", "jax", "jaxlib", "flax", "optax", "numpy", "JAX's CPU", "engines", "user's cache", "host"):
        assert f"ok    {subject} " in out
    assert "fast equals reference bit for bit" in out and "0 failed" in out


def test_every_requirement_of_the_project_is_read():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    found = doctor.requirements()
    assert {"jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes", "orbax-checkpoint", "rich"} == {r.name for r in found if not r.extra}
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert {"torch", "data", "plot", "dev"} <= set(extras) == {r.extra for r in found} - {""}
    for requirement in found:
        assert requirement.name in text and requirement.bounds, requirement


@pytest.mark.parametrize(
    ("bounds", "version", "fits"),
    [
        (">=0.10,<0.11", "0.10.2", True),
        ("<0.11,>=0.10", "0.11.0", False),
        (">=0.10,<0.11", "0.9.9", False),
        (">=2.0", "2", True),
        (">=2.0", "10.1", True),
        ("==2.13.0", "2.13.0+cpu", True),
        ("==2.13.0", "2.13.1", False),
        ("<0.11", "0.11.0rc1", False),
        ("", "1.0", True),
    ],
)
def test_versions_are_compared_number_by_number(bounds: str, version: str, fits: bool):
    assert Requirement("x", bounds).accepts(version) is fits


def test_what_is_missing_or_of_another_version_fails_and_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("optax", "matplotlib"):
            raise importlib.metadata.PackageNotFoundError(name)
        return {"flax": "0.8.5", "tensorboardX": "1.0"}.get(name) or real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    status, found = findings(capsys)
    assert status == 1
    assert found["optax"][0] == FAIL and "pip install 'optax>=0.2.5'" in found["optax"][1]
    assert found["flax"][0] == FAIL and "0.8.5 (expected" in found["flax"][1]
    assert found["extra plot"][0] == OK and "pip install 'tpuflow[plot]' if wanted" in found["extra plot"][1]
    assert found["extra tensorboard"][0] == WARN and "tensorboardX 1.0 (expected >=2.6.2)" in found["extra tensorboard"][1]


def test_a_host_that_computes_otherwise_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    real = Executable.run

    def run(self: Executable, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = real(self, arrays)
        return outputs if self.engine_name == "reference" else {**outputs, "y": np.nextafter(outputs["y"], np.float32(2))}

    monkeypatch.setattr(Executable, "run", run)
    status, found = findings(capsys)
    assert status == 1 and found["engines"][0] == FAIL and "differ in y" in found["engines"][1]


@pytest.mark.parametrize("problem", [RuntimeError("Unknown backend cpu"), AssertionError()])
def test_a_jax_without_a_cpu_fails(problem: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def devices(*_: object) -> None:
        raise problem

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    status, found = findings(capsys)
    assert status == 1 and found["JAX's CPU"][0] == FAIL and "unset it or add cpu" in found["JAX's CPU"][1]


def test_folders_that_cannot_be_used_are_warned_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    a_file = tmp_path / "file"
    a_file.touch()
    monkeypatch.setenv("TPUFLOW_DATA", str(tmp_path / "absent"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(a_file))
    monkeypatch.setattr(doctor, "CHECKS", (doctor._compile_cache, doctor._data))
    monkeypatch.setenv("TPUFLOW_CACHE", str(a_file / "cache"))
    assert findings(capsys)[1]["compile cache"][0] == WARN
    monkeypatch.setenv("TPUFLOW_CACHE", str(tmp_path / "cache"))
    assert findings(capsys)[1]["compile cache"] == (OK, f"{tmp_path / 'cache'}, at most {2**32} bytes; ")
    monkeypatch.delenv("TPUFLOW_CACHE")
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(a_file / "cache"))
    try:
        status, found = findings(capsys)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert status == 0
    assert [found[name][0] for name in ("$TPUFLOW_DATA", "user's cache", "compile cache")] == [WARN] * 3


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def _broken_part():
        raise ImportError("no such library")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (_broken_part, doctor._cores))
    status, found = findings(capsys)
    assert status == 1 and found["broken part"] == (FAIL, f"ImportError: no such library; {doctor.MEND}")
    assert found["host"][0] == OK


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"tpuflow {__version__}\n"
    assert f'version = "{__version__}"' in (Path(__file__).parents[1] / "pyproject.toml").read_text()


def test_the_catalogue_is_listed_with_its_figures_and_sources(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    out = tmp_path / "chips.json"
    assert cli.main(["chips", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads(out.read_text())}
    assert set(rows) == set(CHIPS)
    for name, chip in CHIPS.items():
        line = next(line for line in text.splitlines() if line.startswith(f"{name} "))
        assert f"{chip.peak_flops('bf16') / 1e12:.1f}" in line and f"{chip.hbm_bytes_per_second / 1e9:.0f}" in line
        assert f"{name}: {chip.source}"[:60] in text
        assert rows[name]["matrix_flops_per_second"]["s8"] == chip.peak_flops("s8") and rows[name]["vmem_bytes"] == chip.vmem_bytes
    assert cli.main(["chips", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == list(rows.values())


def test_a_reader_who_has_had_enough_gets_no_complaint():
    command = f"{sys.executable} -m tpuflow chips --json | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[\n" and done.stderr == ""
