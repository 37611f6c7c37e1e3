"""Calls of the host from programs for several chips: by each chip inside of a shard_map, once elsewhere, as JAX makes them."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tpuflow
from tests.host_calls_on_meshes import CASES, HEARD, X, by_hand, mesh_of, run, told
from tpuflow.device.verify import verify
from tpuflow.errors import ProgramError, UnsupportedPrimitiveError

FOUR = "--xla_force_host_platform_device_count=4"


@functools.cache
def in_a_process(*arguments: str, **environment: str) -> dict[str, Any]:
    """All cases, in a process of their own."""
    command = [sys.executable, "-m", "tests.host_calls_on_meshes", *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def by_jax() -> dict[str, Any]:
    return in_a_process(JAX_PLATFORMS="cpu", XLA_FLAGS=FOUR)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.heard])
def test_jax_hears_what_is_written_here(name: str) -> None:
    assert sorted(by_jax()[name][1]) == sorted(CASES[name].heard)


@pytest.mark.parametrize("options", [{}, {"fidelity": "bitexact"}, {"engine": "reference"}], ids=["fast", "bitexact", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_chips_call_the_host_as_devices_do_under_jax(name: str, options: Any) -> None:
    results, heard = run(name, functools.partial(tpuflow.jit, **options))
    want, listed = by_jax()[name]
    assert sorted(heard) == sorted(listed)
    for x, y in zip(results, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("way", ["host devices", "plugin"])
def test_several_devices_call_it_too(way: str) -> None:
    found = in_a_process("spread", JAX_PLATFORMS="cpu", XLA_FLAGS=FOUR) if way == "host devices" else in_a_process(
        JAX_PLATFORMS="tpusim", TPUFLOW_DEVICES="4"
    )  # fmt: skip
    for name, (results, heard) in found.items():
        want, listed = by_jax()[name]
        assert sorted(heard) == sorted(listed), name
        for x, y in zip(results, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("engine", "heard"),
    [
        ("fast", [*X[::2, 0], *X[1::2, 1]]),  # call after call
        ("reference", X[[0, 1, 2, 3, 4, 5, 6, 7], [0, 1] * 4].tolist()),  # chip after chip, until they have to meet
    ],
)
def test_the_chips_of_a_device_call_in_their_order(engine: str, heard: list[float]) -> None:
    HEARD.clear()
    jax.block_until_ready(tpuflow.jit(by_hand(lambda x: (told(x[0, 0]), told(x[1, 1]), x)[2]), engine=engine)(X))
    jax.effects_barrier()
    assert HEARD == heard


@pytest.mark.parametrize("size", [-1, 2])
def test_a_training_over_a_mesh_prints_in_every_step(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    from flax import linen as nn

    class Net(nn.Module):
        """One layer that prints."""

        @nn.compact
        def __call__(self, x: Any) -> Any:
            jax.debug.print("rows {}", x.shape[0])
            return nn.Dense(2)(x)

    rows = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    labels = np.zeros(16, np.int32)
    tpuflow.train(Net(), (rows, labels), batch_size=8, epochs=1, sink_size=size, mesh={"data": 4}, progress=False)
    jax.effects_barrier()
    assert capsys.readouterr().out.count("rows 2") == 2 * 4


def test_what_a_function_raises_is_raised_at_the_caller() -> None:
    def host(x: Any) -> Any:
        raise ValueError("three")

    step = tpuflow.jit(by_hand(lambda x: jax.pure_callback(host, x, x)))
    with pytest.raises(Exception, match="three"):
        jax.block_until_ready(step(X))
    np.testing.assert_array_equal(tpuflow.jit(by_hand(lambda x: x + 1))(X), X + 1)


def test_a_call_that_is_made_once_is_refused_where_not_all_chips_come() -> None:
    program = tpuflow.jit(by_hand(CASES["on one of them"].function)).program(X)
    verify(program)
    once = dataclasses.replace(program, functions=tuple(dataclasses.replace(f, per_chip=False) for f in program.functions))
    with pytest.raises(ProgramError, match=r"callhost \d+\.branch1\.\d+: lies in switch \d+, which chips may run differently"):
        verify(once)


def printing(**options: Any) -> Callable[[Any], Any]:
    return lambda x: (jax.debug.print("{}", x, **options), x)[1]


def partly_mapped(x: Any) -> Any:
    return jax.shard_map(printing(), mesh=mesh_of(), in_specs=P("a"), out_specs=P("a"), axis_names={"a"})(x)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "in order": (printing(ordered=True), "'debug_print' with ordered=True .*inside of jax.shard_map"),
    "of pieces": (printing(partitioned=True), "partitioned=True outside of jax.shard_map.*Leave it out"),
    "of some axes": (partly_mapped, "inside of a jax.shard_map over some axes alone.*Leave axis_names out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_partitioned_program_cannot_is_refused_with_its_line(name: str) -> None:
    function, said = REFUSED[name]
    with pytest.raises(UnsupportedPrimitiveError, match=r"test_host_calls_on_meshes\.py:\d+.*" + said):
        tpuflow.jit(function, in_shardings=NamedSharding(mesh_of(), P("a")))(X)


def test_chips_that_have_the_same_do_not_call_twice() -> None:
    """What is mapped over some axes alone, in a program that nobody partitions."""
    with pytest.raises(UnsupportedPrimitiveError, match=r"test_host_calls_on_meshes\.py:\d+.*some axes alone"):
        tpuflow.jit(partly_mapped)(X)
