"""Programs for several devices under stock JAX: on eight simulated devices as on eight of JAX's CPU backend, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxlib import xla_client

from tests.entry_points import installed
from tests.pjrt_mesh_cases import CASES, square
from tests.quick import FLAGS
from tpuflow.errors import ProgramFileError
from tpuflow.jaxprs.plugins import assigned, placement_of
from tpuflow.pjrt.envelope import ProgramMetadata, pack, unpack

REPOSITORY = Path(__file__).parents[1]
ON_DEVICE = {"JAX_PLATFORMS": "tpusim", "TPUFLOW_DEVICES": "8"}
ON_CPU = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    plugins = installed(tmp_path_factory.mktemp("plugins"), "jax_plugins")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "TPUFLOW_", "XLA_"))}
    return kept | {"PYTHONPATH": os.pathsep.join((plugins, str(REPOSITORY))), "XLA_FLAGS": FLAGS}


def run(environment: Mapping[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=REPOSITORY, text=True, capture_output=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def computed(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """What all cases gave, on simulated devices and on the CPU's."""
    folder = tmp_path_factory.mktemp("computed")
    for name, platform in (("device", ON_DEVICE), ("cpu", ON_CPU)):
        run(environment | platform, "-m", "tests.pjrt_mesh_cases", str(folder / f"{name}.npz"))
    return np.load(folder / "device.npz"), np.load(folder / "cpu.npz")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_stock_program_for_eight_devices_computes_what_it_does_on_the_cpu_and_leaves_it_where_it_does(computed, name):
    found, expected = computed
    keys = [key for key in expected if key.startswith(f"{name} ")]
    assert keys and keys == [key for key in found if key.startswith(f"{name} ")]
    for key in keys:
        assert found[key].dtype == expected[key].dtype, key
        tolerance = 2e-6 if name == "training" else 0  # f32 sums over chips in another order; all other numbers are small integers
        np.testing.assert_allclose(found[key], expected[key], rtol=tolerance, atol=tolerance, err_msg=key)


@pytest.mark.slow
def test_the_guides_program_for_several_devices_runs(environment):
    *_, piece = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "pjrt.md").read_text(encoding="utf-8"), re.S)
    assert run(environment | ON_DEVICE, "-c", piece) == "P('data', 'model') TpuSimDevice(id=3, chip=generic)\n"


@pytest.fixture(scope="module")
def facts(environment: dict[str, str]) -> dict[str, Any]:
    return json.loads(run(environment | ON_DEVICE, "-m", "tests.pjrt_mesh_checks").splitlines()[-1])


def test_donated_arrays_are_gone_on_all_devices(facts):
    cut, whole, total, doubled, error = facts["donation"]
    assert (cut, whole, total, doubled) == (True, True, 128.0, 48.0)
    assert "deleted" in error


def test_each_device_has_its_piece_at_the_host(facts):
    assert facts["pieces_at_the_host"] == [True, "pinned_host", 128.0, 8 * 8 * 4 / 8]


def test_what_one_device_does_with_its_part_of_a_result_the_others_do_not_notice(facts):
    deleted, doubled, device, others = facts["one_devices_part_of_a_result_is_its_own"]
    assert deleted == [i == 3 for i in range(8)]
    assert (doubled, device, others) == (12.0, 3, [6.0] * 7)


def test_each_device_holds_its_pieces_and_gives_their_memory_back(facts):
    grown, given_back = facts["memory"]
    assert grown == [4 * (8 * 8 // 8 + 8 * 8 // 2 + 8)] * 8  # f32: cut over both axes, cut over "a", whole
    assert given_back


def test_an_executable_for_several_devices_survives_its_bytes(facts):
    specs, element, total = facts["a_serialized_executable_runs_and_says_how_results_are_cut"]
    assert specs == ["P('b', 'a')", "P('b',)"]
    assert (element, total) == (1.0, "34j")


def test_the_text_of_a_partitioned_program_is_what_each_device_runs(facts):
    assert "f32[4,2]" in facts["text"] and "all-reduce" in facts["text"]
    assert "tpuflow_partitioned" not in facts["text"]


def test_analyses_are_of_one_chip(facts):
    assert facts["analyses"] == [4 * 8, 2 * 4 * 8]


def test_what_cannot_be_partitioned_is_an_error_and_the_process_lives_on(facts):
    errors = facts["errors"]
    assert "RESOURCE_EXHAUSTED" in errors["too large"] and "f32[131072,262144]" in errors["too large"]
    assert errors["alive"] == float(square().sum()) + square().size


@pytest.mark.parametrize("devices", [(0,), (3,), (2, 0, 300, 1), tuple(range(200))[::-1]])
def test_a_compilation_is_for_the_devices_that_its_options_name(devices):
    options = xla_client.CompileOptions()
    options.num_partitions = len(devices)
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([devices]))
    placement = placement_of(options.SerializeAsString())
    assert (placement.replicas, placement.partitions, placement.devices) == (1, len(devices), devices)
    assert assigned(devices) == options.device_assignment.serialize()


def test_a_serialised_executable_is_refused_by_another_version():
    own = ProgramMetadata([2, 0], [1], [3], b"module")
    assert unpack(pack(own, b"program")) == (own, b"program")
    for damaged in (
        b"tpusim\x01" + bytes(20),
        b"tpusim",
        pack(ProgramMetadata([1] * 9), b"")[:30],
        pack(ProgramMetadata(module=b"module"), b"")[:-1],
    ):
        with pytest.raises(ProgramFileError, match="delete the cache's directory"):
            unpack(damaged)
