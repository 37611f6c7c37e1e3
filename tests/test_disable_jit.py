"""Under jax.disable_jit a function on the device is Python that sees values, and every operation is still the device's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import tpuflow
from tpuflow.errors import UnsupportedPrimitiveError
from tpuflow.stages import eager, staging

X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def training_step(w: Any, x: Any) -> Any:
    """Gradients, an optimizer, random numbers, loops."""
    loss, grads = jax.value_and_grad(lambda w: jnp.mean(jax.nn.gelu(x @ w.T) ** 2))(w)
    updates, _ = OPTIMIZER.update(grads, OPTIMIZER.init(w), w)
    noise = jax.random.normal(jax.random.split(jax.random.key(3))[0], w.shape)
    total, parts = lax.scan(lambda c, row: (c + row.sum(), jnp.sort(row)), jnp.float32(0), w)
    return optax.apply_updates(w, updates), loss, noise, total, parts, jax.vmap(jnp.tanh)(x)


@pytest.mark.slow
def test_a_function_one_by_one_gives_the_bits_of_the_compiled_one() -> None:
    step = tpuflow.jit(training_step, fidelity="bitexact")
    compiled = step(X, X + 1)
    with jax.disable_jit():
        found = step(X, X + 1)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(compiled), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_python_sees_values_and_may_choose_by_them() -> None:
    seen: list[float] = []

    def fn(x: Any, times: int) -> Any:
        seen.append(float(x.sum()))
        x = x * times if x[0, 0] > 0 else -x
        return lax.while_loop(lambda x: (seen.append(float(x.max())), x.max() < 50)[1], lambda x: 2 * x, x)

    with jax.disable_jit():
        result = tpuflow.jit(fn, static_argnums=1)(np.ones((2, 2)), 3)
    assert seen == [4, 3, 6, 12, 24, 48, 96]
    assert np.asarray(result).tolist() == [[96, 96], [96, 96]]


def test_every_operation_runs_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def watched(jaxpr: Any, name: str, target: Any, arguments: Any) -> Any:
        ran.append(name)
        return staging.run_jaxpr(jaxpr, name, target, arguments)

    monkeypatch.setattr(eager, "run_jaxpr", watched)
    with jax.disable_jit():
        tpuflow.jit(lambda x: jax.grad(lambda x: jnp.sum(jnp.tanh(x) @ x.T))(x))(X)
    assert ran.count("dot_general") == 3 and {"tanh", "reduce_sum", "mul", "transpose"} <= set(ran)


def test_what_the_device_has_not_is_refused_there_too() -> None:
    with jax.disable_jit(), pytest.raises(UnsupportedPrimitiveError, match="'schur'"):
        tpuflow.jit(lambda x: lax.linalg.schur(x @ x.T))(X)


def test_prints_come_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with jax.disable_jit():
        tpuflow.jit(lambda x: (jax.debug.print("{}", x[0, 0] * 0), print("then")))(X)
    assert capsys.readouterr().out in ("0.0\nthen\n", "-0.0\nthen\n")


def test_under_a_transformation_and_in_sinks_the_device_runs_whole_programs() -> None:
    fn, step = tpuflow.jit(lambda x: jnp.sum(lax.fori_loop(0, 3, lambda _, x: x * x, x))), lambda s, b: (s + b.sum(), {"s": s})
    expected = jax.grad(fn)(X), [s.metrics["s"] for s in tpuflow.sink(step, [X] * 3, -1, state=np.float32(0), epochs=1)]
    with jax.disable_jit():
        found = jax.grad(fn)(X), [s.metrics["s"] for s in tpuflow.sink(step, [X] * 3, -1, state=np.float32(0), epochs=1)]
        assert "scan" in str(tpuflow.jit(lambda x: lax.fori_loop(0, 3, lambda _, x: x * x, x)).lower(X).jaxpr)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_maps_over_devices_are_refused() -> None:
    with jax.disable_jit(), pytest.raises(UnsupportedPrimitiveError, match=r"jax\.disable_jit"):
        tpuflow.jit(jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i"))(X[None])
