"""A launch is cut into slices at the loops of its Program: the same bits whatever the slices, and Ctrl-C is answered within seconds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpuflow
from tests import interrupted_launches, programs
from tpuflow.compiler import compile_function
from tpuflow.device.fast import cache, cuts, execution
from tpuflow.device.fast.cuts import Cuts, HostLoop, Stage
from tpuflow.device.fast.engine import FastEngine, _stages
from tpuflow.device.host_memory import available_bytes
from tpuflow.device.interrupts import defer_interrupts
from tpuflow.device.limits import Limits
from tpuflow.device.runtime import Executable
from tpuflow.errors import HostMemoryError
from tpuflow.isa.program import Program

REPOSITORY = Path(__file__).parents[1]
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
NEVER, ALWAYS = float("inf"), -1.0


def counted(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 7, lambda i, y: jnp.sin(y) * 1.1 + i, x)


def conditional(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda y: y.sum() < 50, lambda y: y * 1.1 + 0.3, x)


def never_entered(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda y: y.sum() > 1e9, lambda y: y * 2, x) + 1


def stacked(x: jax.Array) -> Any:
    return jax.lax.scan(lambda c, row: (c * 0.5 + row, jnp.exp(c)), x[0], x)


def one_after_the_other(x: jax.Array) -> Any:
    a = jax.lax.fori_loop(0, 3, lambda _, y: y * y - 0.3, jnp.cos(x))
    b = jax.lax.while_loop(lambda c: c[0] < a.sum() + 9, lambda c: (c[0] + 1, c[1] + a), (jnp.float32(0), x))
    return a.T @ b[1], b[0]


def data_dependent(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, (x > 0).sum(), lambda i, y: y + x * i, x)


def nested(x: jax.Array) -> Any:
    def outer(i: jax.Array, c: Any) -> Any:
        y = jax.lax.fori_loop(0, 3, lambda j, z: jnp.tanh(z) + c[1] * j, c[0])
        w = jax.lax.while_loop(lambda w: w.max() < 5, lambda w: w * 1.5 + 1, jnp.abs(y))
        return jax.lax.cond(i % 2 == 0, lambda: (y + w, c[1] * 0.9), lambda: (y - w, c[1]))

    return jax.lax.fori_loop(0, 5, outer, (x, jnp.float32(0.5)))


def while_of_loops(x: jax.Array) -> Any:
    def body(c: Any) -> Any:
        return c[0] + 1, jax.lax.fori_loop(0, 4, lambda j, z: z * 0.9 + j, c[1])

    return jax.lax.while_loop(lambda c: jax.lax.fori_loop(0, 2, lambda _, s: s + c[0], 0) < 8, body, (0, x))


def narrow(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 6, lambda i, y: jnp.exp(y * 0.1) - y / 3, x.astype(jnp.bfloat16))


def half(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 6, lambda i, y: y * y + jnp.float16(0.25), (x * 3).astype(jnp.float16))


def narrow_within(x: jax.Array) -> jax.Array:
    return narrow(x).astype(jnp.float32) + half(x).astype(jnp.float32)


def from_constants(x: jax.Array) -> Any:
    table = jnp.asarray(np.arange(24, dtype=np.float32).reshape(4, 6))
    return jax.lax.fori_loop(0, 5, lambda i, c: (c[0] + table * i, c[1], c[0] - c[1]), (table, x, table))


LOOPS = (
    counted, conditional, never_entered, stacked, one_after_the_other, data_dependent, nested, while_of_loops, narrow, half, narrow_within,
    from_constants,
)  # fmt: skip


@contextmanager
def cutting(short: float, long_trip: float, slices: tuple[int, ...] = (1, 2)) -> Iterator[None]:
    """Loops of more work than `short` are cut; those with longer trips than `long_trip` the host goes round."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cuts, "SHORT", short)
        patched.setattr(cuts, "LONG_TRIP", long_trip)
        patched.setattr(execution, "SLICE_SECONDS", 0.0)
        patched.setattr(execution, "FIRST_SLICES", slices)
        cache.clear()
        try:
            yield
        finally:
            cache.clear()


@pytest.mark.parametrize("trip_seconds, trips", [(0.001, 1000), (0.1, 10), (0.3, 3), (0.9, 2), (1.1, 1), (9.0, 1)])
def test_a_slice_takes_a_second_or_two_trips_of_up_to_a_second(trip_seconds: float, trips: int):
    assert execution.Pace(len(execution.FIRST_SLICES), trip_seconds).trips() == trips


def outputs(program: Program, fidelity: str, engine: str = "fast") -> list[bytes]:
    found, _ = Executable(program, engine, fidelity).launch([X.copy() for _ in program.inputs])
    return [np.asarray(x).tobytes() for x in found]


def segments(program: Program) -> list[Stage | HostLoop]:
    return list(FastEngine(program, verified=True).segments)


def cuts_of(program: Program) -> Cuts:
    made = FastEngine(program, verified=True).translation
    return Cuts(made.program, made.liveness)


@pytest.mark.parametrize("fidelity", ["bitexact", "native"])
@pytest.mark.parametrize("function", LOOPS, ids=lambda f: f.__name__)
def test_slices_change_no_bit(function: Callable[..., Any], fidelity: str):
    program = compile_function(function, (X,))
    with cutting(NEVER, NEVER):
        whole = outputs(program, fidelity)
        assert len(segments(program)) == 1
    with cutting(ALWAYS, NEVER):
        assert any(s.loop for s in segments(program) if isinstance(s, Stage))
        assert outputs(program, fidelity) == whole
    with cutting(ALWAYS, ALWAYS, (3,)):
        assert outputs(program, fidelity) == whole
    if fidelity == "bitexact":
        assert outputs(program, fidelity, "reference") == whole


def test_the_host_goes_round_loops_whose_trips_are_long():
    program = compile_function(nested, (X,))
    with cutting(ALWAYS, ALWAYS):
        found = segments(program)
        assert any(isinstance(s, HostLoop) for s in found) and sum(s.loop is not None for s in _stages(found)) == 2


@pytest.mark.parametrize("donate", [(), 0])
def test_slices_leave_alone_what_is_not_donated(donate: Any):
    x = jnp.asarray(X)
    with cutting(ALWAYS, ALWAYS):
        first, second = (tpuflow.jit(one_after_the_other)(x) for _ in range(2))
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True)) and np.array_equal(x, X)
        tpuflow.jit(counted, donate_argnums=donate)(x)
        assert x.is_deleted() == (donate == 0)


def test_the_same_array_may_be_given_twice():
    x = jnp.asarray(X)
    with cutting(ALWAYS, ALWAYS):
        a, b = tpuflow.jit(lambda a, b: jax.lax.fori_loop(0, 3, lambda _, c: (c[1], c[0] + 1), (a, b)), donate_argnums=(0, 1))(x, x)
    assert np.array_equal(a, X + 1) and np.array_equal(b, (X + 1) + 1)


def test_what_is_short_is_one_executable_and_not_waited_for():
    matrix = jax.ShapeDtypeStruct((512, 512), np.float32)  # some milliseconds, of which a launch in pieces would take a tenth
    for function, x in ((lambda x: jnp.tanh(x) @ x.T, X), (counted, X), (lambda x: x @ x, matrix), (counted, matrix)):
        program = compile_function(function, (x,))
        assert len(segments(program)) == 1 and cuts_of(program).short
    large = compile_function(lambda x: x @ x, (jax.ShapeDtypeStruct((2048, 2048), np.float32),))
    assert len(segments(large)) == 1 and not cuts_of(large).short


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_a_launch_tells_of_every_slice_what_a_shorter_launch_would_give(engine: str):
    program, zeros = programs.feed_program(), np.zeros((10, 20), np.float32)
    items = np.random.default_rng(0).standard_normal((6, 10, 20), np.float32)
    told: list[tuple[Any, Any, int]] = []

    def launch(count: int, **options: Any) -> tuple[Any, Any]:
        return Executable(program, engine, "bitexact").launch([np.int32(count), zeros.copy()], [items], start=1, count=count, **options)

    with cutting(ALWAYS, NEVER, (2, 1)):
        launch(5, on_slice=lambda *told_of: told.append(([np.array(x) for x in told_of[0]], told_of[1], told_of[2])))
    assert [trips for *_, trips in told] == ([2, 1, 1, 1] if engine == "fast" else [1] * 5)
    for n, (state, _, _) in enumerate(told, 1):
        done = sum(trips for *_, trips in told[:n])
        (shorter,), (sent,) = launch(done)
        assert np.array_equal(state[0], shorter)
        assert np.array_equal(np.concatenate([sent[0] for _, sent, _ in told[:n]]), sent)


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


def test_ctrl_c_is_held_back_until_the_end_of_the_outermost_block():
    reached = False
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), defer_interrupts():
        with defer_interrupts():
            signal.raise_signal(signal.SIGINT)
        reached = True
    assert reached and signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_every_long_launch_answers_ctrl_c_within_three_seconds():
    command = [sys.executable, "-m", "tests.interrupted_launches", *interrupted_launches.LAUNCHES]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert set(found) == set(interrupted_launches.LAUNCHES)
    for name, answer in found.items():
        assert answer["seconds"] < 3.0 and answer["abandoned"] == (name == "straight"), found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fori", "straight"])
def test_the_command_line_ends_with_130_and_one_line(name: str, tmp_path: Path):
    function, x = interrupted_launches.LAUNCHES[name]
    compiled = tpuflow.jit(function).lower(x).compile()
    compiled.save(tmp_path / "long.tpx")
    np.savez(tmp_path / "x.npz", **{compiled.executable.program.inputs[0].name: x})
    command = [sys.executable, "-m", "tpuflow", "run", "long.tpx", "--inputs", "x.npz", "--outputs", "y.npz"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(REPOSITORY)}
    )
    time.sleep(8)  # imports, loads, translates, runs
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == "", err
    assert err.startswith("tpuflow run: interrupted") and err.count("\n") == 1 and not (tmp_path / "y.npz").exists()


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_host_without_memory_is_an_error_with_both_numbers():
    x = np.ones(2**22, np.float32)
    program = compile_function(lambda x: x[:, None] + x, (x,), chip=huge())
    there = available_bytes()
    with pytest.raises(HostMemoryError, match=r"asked for [\d,]+ bytes at once; the host has [\d,]+ bytes available"):
        Executable(program, limits=Limits(memory_bytes=2**60)).launch([x])
    assert there is None or there < 2**46


@pytest.mark.parametrize(
    "error", [MemoryError("Unable to allocate 3.6 TiB"), RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 40 bytes.")]
)
def test_whoever_is_refused_memory_the_error_is_ours(error: Exception, monkeypatch: pytest.MonkeyPatch):
    short, sliced = Executable(compile_function(lambda x: x + 1, (X,))), Executable(compile_function(conditional, (X,)))
    ours = error, HostMemoryError, "asked for 40 bytes at once|was refused memory .Unable to allocate"
    for executable, method in ((short, "once"), (sliced, "start")):
        for raised, kind, said in (ours, (RuntimeError("something else"), RuntimeError, "^something else$")):
            monkeypatch.setattr(executable._engine, method, Mock(side_effect=raised))
            with pytest.raises(kind, match=said):
                executable.launch([X])


def huge() -> tpuflow.Chip:
    """A chip with more memory than any host."""
    return replace(tpuflow.get_chip("generic"), name="huge", hbm_bytes=2**50)
