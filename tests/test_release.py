"""The wheel holds what a user needs and owns no name but `tpuflow`; the README's first example runs from it alone."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.release import REPOSITORY, build, expected_files, files_of, first_example

OFFLINE = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("dist"), isolated=False)


def test_the_models_of_the_package_are_those_of_the_checkout():
    for name in ("mlp", "resnet", "gpt2"):
        found = importlib.import_module(f"tpuflow.examples.models.{name}").__file__
        assert found and Path(found) == REPOSITORY / "models" / f"{name}.py"


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_owns_no_other_name(built: tuple[Path, Path]):
    wheel, _ = built
    assert files_of(wheel) == expected_files()
    assert {name.partition("/")[0] for name in files_of(wheel)} == {"tpuflow"}
    assert wheel.stat().st_size < 8e6


@pytest.mark.slow
def test_the_sdist_holds_what_builds_the_wheel_and_no_tests(built: tuple[Path, Path]):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "models/mlp.py", "tpuflow/examples/weights/mlp_torch_seed0.npz"} <= names
    assert not any(name.startswith(("tests/", "train/", "bench/")) for name in names)


@pytest.mark.slow
def test_the_first_example_runs_from_the_wheel_in_an_empty_folder(built: tuple[Path, Path], tmp_path: Path):
    """Unpacked, for installing needs an index; without a network, so on the images that come with it."""
    package, empty = tmp_path / "package", tmp_path / "empty"
    empty.mkdir()
    with ZipFile(built[0]) as archive:
        archive.extractall(package)
    environment = {name: value for name, value in os.environ.items() if name != "TPUFLOW_DATA"}
    environment |= {"PYTHONPATH": str(package), "XDG_CACHE_HOME": str(tmp_path / "cache"), **OFFLINE}
    code = f"{first_example()}\nimport sys\nprint(tpuflow.__file__, {{'models', 'train'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-"], input=code, cwd=empty, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "epoch 5: loss" in done.stdout and done.stdout.endswith(f"{package / 'tpuflow' / '__init__.py'} set()\n")
    assert "NO FASHION-MNIST" in done.stderr
    command = [sys.executable, "-m", "tpuflow", "check", "tpuflow.examples.mnist:step", "--chip", "bm1690", "--compare", "--json"]
    verdict = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True)
    assert verdict.returncode == 0 and '"fits": true' in verdict.stdout, verdict.stderr
