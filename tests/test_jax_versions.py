"""The older minor versions of JAX that the package takes, each installed from the package index into a folder of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench.jax_versions import DOORS, NEWEST, install, tried

NOT_INSTALLED = [version for version in NEWEST if version != max(NEWEST, key=lambda v: [*map(int, v.split("."))])]


@pytest.fixture(scope="module", params=NOT_INSTALLED)
def packages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of them."""
    folder = tmp_path_factory.mktemp("jax") / "site-packages"
    try:
        install(request.param, folder)
    except subprocess.CalledProcessError as problem:
        pytest.skip(f"the package index does not give jax {request.param}: {problem.stderr.decode().strip().splitlines()[-1:]}")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_every_door_is_open_with_older_versions_of_jax(packages, door):
    assert tried(door, packages) == "works"
