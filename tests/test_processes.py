"""One mesh over two processes under `jax.distributed`: the bits of one process, and what is said when one is lost."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import tpuflow
from tests import process_of_two
from tpuflow.device.fast.engine import FastEngine
from tpuflow.device.fast.host_devices import parts_of
from tpuflow.errors import ConfigError, PeerError
from tpuflow.isa.collectives import MeshAxis
from tpuflow.jaxprs import processes

ROOT = Path(__file__).parents[1]
SECONDS = 900  # the tests of a machine with other work
WAITS_SECONDS = 30  # less than the heartbeats have, more than one process is behind the other


def started(arguments: Sequence[str], folder: Path, **variables: str) -> list[tuple[int, str]]:
    """Exit status and output of two processes of a program, which is given its number and a port besides."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    compiled = {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **compiled, **variables}
    running = [
        subprocess.Popen(
            [sys.executable, *(part.format(process=n, port=port) for part in arguments)],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for n in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, text) for process, text in zip(running, said, strict=True)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, str]]]:
    """The folder of the two processes' results, and how they ended."""
    folder = tmp_path_factory.mktemp("two")
    return folder, started(["-m", "tests.process_of_two", "{process}", "{port}", str(folder), "SIGKILL"], folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", process_of_two.WORK)
def test_two_processes_have_the_bits_of_one(name: str, two: tuple[Path, list[tuple[int, str]]]) -> None:
    folder, ended = two
    alone = process_of_two.WORK[name]()
    for process in range(2):
        path = folder / f"{name}{process}.npz"
        assert path.exists(), ended
        with np.load(path) as found:
            assert set(found) == set(alone)
            for key, expected in alone.items():
                assert found[key].dtype == expected.dtype and found[key].tobytes() == expected.tobytes(), (process, key)


@pytest.mark.slow
def test_a_lost_process_is_an_error_and_its_training_goes_on_over_another_mesh(two: tuple[Path, list[tuple[int, str]]]) -> None:
    folder, ((first, said), (second, _)) = two
    assert (first, second) == (process_of_two.LOST, -9), said
    text = (folder / "lost.txt").read_text()
    assert "process 0 of 2: another process of this computation is gone" in text and "resume=" in text
    alone, resumed = process_of_two.train(), process_of_two.train(resume=folder / "run")
    assert resumed.resumed_at == process_of_two.DIES_AFTER
    expected, found = process_of_two.arrays_of(alone), process_of_two.arrays_of(resumed)
    assert {key: x.tobytes() for key, x in found.items()} == {key: x.tobytes() for key, x in expected.items()}
    with pytest.warns(RuntimeWarning, match="not the one it was saved with"):
        elsewhere = process_of_two.train("zero1", mesh={"data": 2}, resume=folder / "run")
    assert elsewhere.resumed_at == process_of_two.DIES_AFTER and elsewhere.steps == alone.steps
    assert elsewhere.losses[: process_of_two.DIES_AFTER] == alone.losses[: process_of_two.DIES_AFTER] and not elsewhere.nan_steps


@pytest.mark.slow
def test_a_process_that_stands_still_is_an_error_within_the_time_that_collectives_have_and_leaves_its_checkpoint(tmp_path: Path) -> None:
    arguments = ["-m", "tests.process_of_two", "{process}", "{port}", str(tmp_path), "SIGSTOP"]
    (first, said), (second, _) = started(arguments, tmp_path, XLA_FLAGS=f"--xla_cpu_collective_timeout_seconds={WAITS_SECONDS}")
    assert (first, second) == (process_of_two.LOST, -9), said
    text = (tmp_path / "lost.txt").read_text()
    assert "process 0 of 2: another process of this computation stands still, or is cut off" in text and "resume=" in text
    assert process_of_two.train(resume=tmp_path / "run").resumed_at == process_of_two.DIES_AFTER


SUMS = """
import sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
jax.distributed.initialize("localhost:" + sys.argv[2], 2, int(sys.argv[1]))
cut = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
x = jax.make_array_from_callback((4,), cut, lambda place: np.arange(4.0)[place])
print(jax.default_backend(), float(jax.jit(lambda x: x.sum())(x)))
"""


def test_processes_that_ask_for_no_platform_run_on_the_cpu_beside_the_plugin(tmp_path: Path) -> None:
    """jaxlib tells every plugin that JAX finds of the other processes, and ends its own if one does not want to know."""
    ended = started(["-c", SUMS, "{process}", "{port}"], tmp_path, JAX_PLATFORMS="")
    assert all(status == 0 and "cpu 6.0" in said.splitlines() for status, said in ended), ended


@pytest.mark.parametrize(
    ("said", "fate"),
    [
        ("Gloo AllGather failed: Read error [127.0.0.1]:39840: Connection reset by peer", "is gone"),
        ("Gloo AllGather failed: Timed out waiting 10000ms for send operation to complete", "stands still, or is cut off"),
    ],
)
def test_what_xla_says_of_a_process_becomes_an_error_that_says_what_to_do(said: str, fate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "count", lambda: 2)
    with pytest.raises(PeerError, match=f"another process of this computation {fate} .*with resume="), processes.peers():
        raise ValueError(said)


def test_a_process_lost_in_a_short_program_is_told_as_in_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    total = tpuflow.jit(jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()))
    x = np.ones(4, np.float32)
    np.testing.assert_array_equal(total(x), [2, 2])

    def lost(engine: FastEngine, inputs: object) -> None:
        raise ValueError("Gloo AllGather failed: Connection closed by peer")

    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(FastEngine, "_only_stage", lost)
    with pytest.raises(PeerError, match="another process of this computation is gone"):
        total(x)


@pytest.mark.slow
def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "processes.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(code.replace('"localhost:9911"', "sys.argv[2]"))
    (first, said), (second, nothing) = started(["train.py", "{process}", "localhost:{port}"], tmp_path)
    assert (first, second) == (0, 0), said + nothing
    assert "MLP trained in fp32" in said and "MLP trained" not in nothing
    assert [path.name for path in (tmp_path / "run").glob("step_*")]


@pytest.mark.parametrize(
    ("sizes", "devices", "parts"), [((4,), 2, (2,)), ((2, 4), 4, (2, 2)), ((3, 4), 2, (1, 2)), ((2, 3), 6, (2, 3)), ((6, 4), 4, (2, 2))]
)
def test_axes_are_cut_from_the_first_on(sizes: tuple[int, ...], devices: int, parts: tuple[int, ...]) -> None:
    assert parts_of([MeshAxis(f"axis {n}", size) for n, size in enumerate(sizes)], devices) == parts


def test_chips_that_do_not_divide_over_the_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"its 6 chips \('data': 6\) do not divide over the 4 processes.*multiple of 4"):
        parts_of([MeshAxis("data", 6)], 4)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES: expected a number, got 'two'"),
        ({"JAX_NUM_PROCESSES": "2"}, "expected JAX_COORDINATOR_ADDRESS=host:port"),
    ],
)
def test_an_environment_that_says_too_little_is_refused(environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def initialize(address: str | None, count: int | None, number: int | None) -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(ConfigError, match=re.escape(said)):
        processes.join()


def test_one_process_asks_nobody() -> None:
    processes.join()
    processes.check_alike("nothing", b"1", "")
    processes.by_first(lambda: None, ConfigError("never"))
    assert processes.count() == 1 and processes.is_first()
