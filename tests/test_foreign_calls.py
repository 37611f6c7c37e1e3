"""Calls of NumPy functions out of XLA executables: products of padding that meets infinities."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpuflow
from tests.enumerated import Window, gradients
from tests.partitioning import P, mesh_of
from tests.quick import quickly_compiled
from tpuflow.device.fast import padded_product
from tpuflow.jaxprs import foreign_calls
from tpuflow.jaxprs.foreign_calls import foreign_call

REPOSITORY = Path(__file__).parents[1]


def _doubled(text: str, x: np.ndarray) -> np.ndarray:
    if text:
        raise ValueError(f"no {text}")
    assert not x.flags.writeable
    return x * 2


doubled = foreign_call("tpuflow.tests.doubled", _doubled)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.bool_, np.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3, 4)])
def test_arrays_come_and_go_as_they_are(dtype: type[np.generic], shape: tuple[int, ...]):
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    call = foreign_call("tpuflow.tests.same", lambda _, x: x)
    np.testing.assert_array_equal(jax.jit(lambda x: call("", jax.typeof(x), x))(x), x)


def test_under_vmap_the_function_is_called_for_every_lane():
    added = foreign_call("tpuflow.tests.added", lambda _, x, y: x + y)
    x, y = jnp.arange(24.0).reshape(2, 4, 3), jnp.arange(6.0).reshape(2, 3)

    def call(x: jax.Array, y: jax.Array) -> jax.Array:
        return added("", jax.typeof(x), x, y)

    np.testing.assert_array_equal(jax.vmap(lambda x: doubled("", jax.typeof(x), x))(x), 2 * x)
    np.testing.assert_array_equal(jax.vmap(jax.vmap(call), (0, None))(x[:, :2], y), x[:, :2] + y)
    np.testing.assert_array_equal(jax.vmap(jax.vmap(call, (0, None)))(x, y), x + y[:, None])


def test_an_error_in_the_function_fails_the_execution_and_the_next_call_runs():
    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: no numbers"):
        jax.block_until_ready(jax.jit(lambda x: doubled("numbers", jax.typeof(x), x))(jnp.ones(3)))
    np.testing.assert_array_equal(jax.jit(lambda x: doubled("", jax.typeof(x), x))(jnp.ones(3)), [2, 2, 2])


WINDOW = Window((3, 3), (2, 1), ((0, 1), (1, 1)), (1, 1), (1, 1))


def weights_gradient(x: jax.Array, dy: jax.Array) -> jax.Array:
    return jax.vjp(lambda w: WINDOW.convolution(x, w), jnp.zeros((3, 3, x.shape[-1], dy.shape[-1])))[1](dy)[0]


def enumerated_gradient(x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return gradients(WINDOW, x, np.zeros((3, 3, x.shape[-1], dy.shape[-1]), np.float32), dy)[1]


X = np.random.default_rng(0).standard_normal((4, 8, 8, 6)).astype(np.float32)
DY = np.random.default_rng(1).standard_normal((4, 4, 8, 5)).astype(np.float32)
DY[1, 0, 3, 2], DY[2, 2, 0, 4] = np.inf, np.nan


@pytest.mark.parametrize("fidelity", ["native", "bitexact"])
def test_a_product_in_parts_is_the_whole_one(fidelity: str, monkeypatch: pytest.MonkeyPatch):
    with quickly_compiled():
        f = tpuflow.jit(weights_gradient, fidelity=fidelity)
        whole = np.asarray(f(X, DY))
        monkeypatch.setattr(padded_product, "MOST_FACTORS", 100)
        parts = np.asarray(f(X, DY))
    assert np.isinf(whole).any() and np.isnan(whole).any() and np.isfinite(whole).any()
    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(parts, enumerated_gradient(X, DY), rtol=1e-4, atol=1e-4)


def _at(x: np.ndarray, place: int, value: float) -> np.ndarray:
    """x with another number at a place."""
    return np.where(np.arange(x.size).reshape(x.shape) == place, np.float32(value), x)


FINITE = np.where(np.isfinite(DY), DY, 1)
WEIGHTS = np.random.default_rng(2).standard_normal((3, 3, X.shape[-1], DY.shape[-1])).astype(np.float32)


@pytest.mark.parametrize(("w", "dy"), [(WEIGHTS, DY), (_at(WEIGHTS, 17, np.inf), FINITE), (_at(WEIGHTS, 17, np.nan), DY)])
def test_a_product_in_phases_is_corrected(w: np.ndarray, dy: np.ndarray):
    f = tpuflow.jit(lambda w, dy: jax.vjp(lambda x: WINDOW.convolution(x, w), jnp.zeros(X.shape))[1](dy)[0])
    with quickly_compiled():
        found = np.asarray(f(w, dy))
    wanted = gradients(WINDOW, X, w, dy)[0]
    assert np.isfinite(wanted).any() and not np.isfinite(wanted).all()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_many_threads_may_need_it_at_once():
    f, found = tpuflow.jit(weights_gradient), []
    wanted = np.asarray(f(X, DY)).tobytes()

    def call() -> None:
        found.extend(np.asarray(f(X, DY)).tobytes() == wanted for _ in range(20))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 160


@pytest.mark.parametrize("chip", [0, 3])
def test_an_infinity_on_one_of_several_chips_is_that_chips_alone(chip: int):
    def one(x: jax.Array, dy: jax.Array) -> jax.Array:
        return weights_gradient(x, dy)[None]

    each = jax.shard_map(one, mesh=mesh_of({"data": 4}), in_specs=P("data"), out_specs=P("data"), check_vma=False)
    dy = np.where(np.isfinite(DY), DY, 1)
    dy[chip, 0, 3, 2] = np.inf
    with quickly_compiled():
        found = np.asarray(tpuflow.jit(each)(X, dy))
    alone = [enumerated_gradient(X[n : n + 1], dy[n : n + 1]) for n in range(4)]
    np.testing.assert_allclose(found, np.stack(alone), rtol=1e-4, atol=1e-4)
    assert [bool(np.isinf(x).any()) for x in found] == [n == chip for n in range(4)]


def _steps(x: jax.Array, w: jax.Array) -> jax.Array:
    """Convolutions in a loop, padded by zeros, and gradients of their weights."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.sin(WINDOW.convolution(jnp.sin(WINDOW.convolution(x, w)), w))))(w), None

    return jax.lax.scan(step, w, x[None].repeat(3, 0))[0][None]


@pytest.mark.parametrize("chips", [1, 4])
@pytest.mark.parametrize("fidelity", ["native", "bitexact"])
def test_it_is_not_called_where_all_is_finite(fidelity: str, chips: int, monkeypatch: pytest.MonkeyPatch):
    called = []
    monkeypatch.setitem(foreign_calls._functions, "tpuflow.padded_product", lambda text, *arrays: called.append(text))
    each = jax.shard_map(_steps, mesh=mesh_of({"data": chips}), in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False)
    with quickly_compiled():
        jax.block_until_ready(tpuflow.jit(each if chips > 1 else _steps, fidelity=fidelity)(X, np.full((3, 3, 6, 6), 0.1, np.float32)))
    assert not called


ENDS = """
import jax, sys, numpy as np, tpuflow
from tests.test_foreign_calls import X, DY, weights_gradient
compiled = []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
f, many = tpuflow.jit(weights_gradient), int(sys.argv[1])
x, dy = np.repeat(X, many, 0), np.repeat(DY, many, 0)
result = np.asarray(f(x, dy))
print("/jax/core/compile/backend_compile_duration" in compiled, np.isinf(result).sum(), np.isnan(result).sum())
for _ in range(3):
    f(x, dy)
sys.exit(7)
"""


def test_an_executable_from_the_cache_makes_the_call_in_another_process_which_ends_as_it_chose(tmp_path: Path):
    environment = os.environ | {"TPUFLOW_CACHE": str(tmp_path), "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    wanted = enumerated_gradient(X, DY)
    for compiles in (True, False):
        done = subprocess.run([sys.executable, "-c", ENDS, "100"], env=environment, cwd=REPOSITORY, text=True, capture_output=True)
        assert done.returncode == 7, done.stderr[-2000:]
        assert done.stdout.split() == [str(compiles), str(np.isinf(wanted).sum()), str(np.isnan(wanted).sum())]
