"""Long straight code is cut into pieces that are compiled side by side: little is compiled twice, and the results are the whole's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpuflow
from tpuflow.device.fast import cache, cuts, pieces, stored_executables
from tpuflow.device.fast.cuts import HostLoop, Stage
from tpuflow.device.fast.engine import FastEngine, _stages
from tpuflow.device.fast.host import PinnedHost
from tpuflow.device.runtime import Executable
from tpuflow.isa.program import Program
from tpuflow.jaxprs.plugins import cpu_device

X = np.linspace(-1, 1, 32 * 64, dtype=np.float32).reshape(32, 64)
W = np.linspace(-0.2, 0.2, 6 * 64 * 64, dtype=np.float32).reshape(6, 64, 64)


def layers(x: jax.Array, ws: Any) -> jax.Array:
    for w in ws:
        x = x + jnp.tanh(x @ w) * 0.5
    return x


def loss(ws: Any, x: jax.Array) -> jax.Array:
    return (layers(x, ws) ** 2).sum()


def step(ws: Any, x: jax.Array) -> Any:
    """A training step: a layer's kernels have one form in the forward pass, another in the backward pass."""
    value, gradients = jax.value_and_grad(loss)(ws, x)
    return [w - 0.01 * g for w, g in zip(ws, gradients, strict=True)], value


def two_steps(ws: Any, x: jax.Array) -> Any:
    """In a loop that has another one in it, so that the host goes round it."""

    def trip(_: Any, ws: Any) -> Any:
        new, _ = step(ws, jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), x))
        return new

    return jax.lax.fori_loop(0, 2, trip, ws)


@contextmanager
def cutting(least: int, short: float = 0.0) -> Iterator[None]:
    """What counts as long, for the length of a block, with engines that know nothing of what is outside."""
    cache.clear()
    with patch.object(pieces, "LEAST", least), patch.multiple(cuts, SHORT=short, LONG_TRIP=short):
        yield
    cache.clear()


def segments(program: Program) -> list[Any]:
    return list(FastEngine(program, verified=True).segments)


def compiled(f: Callable[..., Any] = step) -> Program:
    return tpuflow.jit(f).program(list(W), X)


def outputs(program: Program, fidelity: str = "native") -> list[np.ndarray]:
    found, _ = Executable(program, "fast", fidelity).launch([*W, X])
    return [np.asarray(x) for x in found]


WHOLE, PIECES = 10**9, 60


def test_a_training_step_is_cut_between_forward_and_backward_pass():
    program = compiled()
    with cutting(PIECES):
        engine = FastEngine(program, verified=True)
    forms = engine.translation.program.forms_by_id()
    first, *_, last = [{forms[id(k)].number for k in cast(Stage, s).blocks if id(k) in forms} for s in engine.segments]
    assert first and last and not first & last


def test_equal_layers_are_not_cut_apart():
    program = tpuflow.jit(layers).program(X, list(W))
    with cutting(PIECES):
        assert len(segments(program)) == 1


@pytest.mark.parametrize("least, short", [(WHOLE, 0.0), (PIECES, float("inf")), (10**4, 0.0)])
def test_what_is_small_or_short_is_not_cut(least: int, short: float):
    with cutting(least, short):
        assert len(segments(compiled())) == 1


def test_no_form_is_in_more_than_a_twentieth_of_both_sides():
    sizes = dict.fromkeys(range(100), 10)
    blocks = [[n] for n in range(50)] + [[n - 2] for n in range(50, 100)]  # two forms are on both sides of the middle
    with patch.object(pieces, "LEAST", 300):
        (cut,) = pieces._cuts(blocks, sizes)
        assert cut == 50 and pieces._compiled_twice(blocks, sizes)[50] == 20
        assert not list(pieces._cuts([[n % 30] for n in range(100)], sizes))


@pytest.mark.parametrize("f", [step, two_steps], ids=["straight", "in a loop of the host"])
def test_pieces_give_what_the_whole_gives(f: Callable[..., Any]):
    program = compiled(f)
    with cutting(WHOLE, 0.0 if f is step else float("inf")):
        whole, native = outputs(program, "bitexact"), outputs(program)
    with cutting(PIECES):
        found = segments(program)
        assert any(s.continued for s in _stages(found)) and any(isinstance(s, HostLoop) for s in found) == (f is two_steps)
        assert [x.tobytes() for x in outputs(program, "bitexact")] == [x.tobytes() for x in whole]
        for a, b in zip(outputs(program), native, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_pieces_run_on_a_device_of_their_own():
    """As under stock JAX's `tpusim`."""
    with cutting(WHOLE):
        whole = outputs(compiled(), "bitexact")
    with cutting(PIECES):
        executable = Executable(compiled(), "fast", "bitexact", device=cpu_device())
        executable.compile()
        found, _ = executable.launch([PinnedHost(cpu_device()).array(x) for x in (*W, X)])
    assert [np.asarray(x).tobytes() for x in found] == [x.tobytes() for x in whole]


def test_donated_arguments_are_taken_by_the_last_piece_alone():
    with cutting(PIECES):
        trained = tpuflow.jit(step, donate_argnums=0)
        ws = [jnp.asarray(w) for w in W]
        new, _ = trained(ws, X)
        newer, _ = trained(new, X)
    assert all(w.is_deleted() for w in (*ws, *new)) and not any(w.is_deleted() for w in newer)


def test_other_threads_compile_what_this_one_translates():
    here, there = [], []

    def lower(self: Any, *specs: Any, of: Any = stored_executables.CachedFunction.lower) -> Any:
        here.append(threading.current_thread())
        return of(self, *specs)

    def compile(self: Any, of: Any = stored_executables._Lowered.compile) -> Any:
        there.append(threading.current_thread())
        return of(self)

    with cutting(PIECES):
        engine = FastEngine(compiled(), verified=True)
        with patch.object(stored_executables.CachedFunction, "lower", lower), patch.object(stored_executables._Lowered, "compile", compile):
            engine.compile()
            engine.compile()
    assert len(here) == len(there) == len(engine.segments) > 1
    assert {*here} == {threading.current_thread()} and threading.current_thread() not in there


def test_what_fails_on_another_thread_fails_where_it_is_called():
    with cutting(PIECES):
        with patch.object(stored_executables._Lowered, "compile", side_effect=RuntimeError("no compiler")):
            with pytest.raises(RuntimeError, match="no compiler"):
                outputs(compiled())
        assert len(outputs(compiled())) == len(W) + 1


@pytest.mark.parametrize("precision", [None, "float32"])
def test_pieces_come_from_the_persistent_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str | None):
    monkeypatch.setenv("TPUFLOW_CACHE", str(tmp_path))
    with cutting(PIECES), jax.default_matmul_precision(precision):
        program = compiled()
        first = [x.tobytes() for x in outputs(program)]
        kept = sorted(tmp_path.glob("executable-*"))
        assert len(kept) == len(segments(program)) > 1
        cache.clear()
        with patch.object(stored_executables, "compile_anew", side_effect=AssertionError):
            assert [x.tobytes() for x in outputs(program)] == first
        kept[0].write_bytes(kept[1].read_bytes())  # another's
        kept[1].write_bytes(b"damaged")
        cache.clear()
        with pytest.warns(RuntimeWarning):
            assert [x.tobytes() for x in outputs(program)] == first
        assert sorted(tmp_path.glob("executable-*")) == kept


def test_compiling_tells_what_fails():
    with cutting(PIECES):
        program = compiled()
        with patch.object(stored_executables._Lowered, "compile", side_effect=RuntimeError("no compiler")):
            with pytest.raises(RuntimeError, match="no compiler"):
                Executable(program).compile()
        Executable(program).compile()
