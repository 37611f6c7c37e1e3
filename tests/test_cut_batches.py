"""What is independent along a batch is computed by each chip for its part of it, whatever XLA's partitioner does by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tpuflow
from tests.partitioning import CLOSE, P, both_engines, cut, floats, kinds, mesh_of
from tpuflow.device.runtime import Executable

DATA = cut("data")


def _largest(x: Any) -> Any:
    return lax.top_k(x, 3)


def _own_row(x: Any) -> Any:
    return jnp.take_along_axis(x, jnp.argmax(x, -1, keepdims=True), -1)


def _counted(x: Any) -> Any:
    return jnp.zeros(8).at[jnp.argmax(x, -1)].add(x[:, 0])


def _definite(x: Any) -> Any:
    return x @ x.mT + jnp.eye(x.shape[-1])


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "top_k": _largest,
    "top_k's gradient": jax.grad(lambda x: jnp.square(_largest(x)[0]).sum()),
    "approx_max_k": lambda x: lax.approx_max_k(x, 3),
    "sort": jnp.sort,
    "argsort": jnp.argsort,
    "cumsum": functools.partial(jnp.cumsum, axis=-1),
    "cumprod": functools.partial(jnp.cumprod, axis=1),
    "cummax": functools.partial(lax.cummax, axis=1),
    "take_along_axis": _own_row,
    "take_along_axis's gradient": jax.grad(lambda x: jnp.square(_own_row(x)).sum()),
    "one_hot": lambda x: jax.nn.one_hot(jnp.argmax(x, -1), 5),
    "scatter": jax.vmap(_counted),
    "gather": jax.vmap(lambda x: x[jnp.argmax(x, 0)]),
    "random bits": lambda x: x * jax.random.uniform(jax.random.key(0), x.shape),
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "rfft2 and irfft2": lambda x: jnp.fft.irfft2(jnp.fft.rfft2(x)),
    "cholesky": lambda x: jnp.linalg.cholesky(_definite(x)),
    "triangular_solve": lambda x: lax.linalg.triangular_solve(_definite(x), x, left_side=True),
    "lu": lambda x: lax.linalg.lu(_definite(x)),
    "solve": lambda x: jnp.linalg.solve(_definite(x), x[..., :1]),
    "inv": lambda x: jnp.linalg.inv(_definite(x)),
    "qr": jnp.linalg.qr,
    "eigh": lambda x: jax.tree.map(jnp.abs, jnp.linalg.eigh(_definite(x))),  # whose signs are free
}
"""Functions of a batch of matrices [B, N, N]."""
X = floats(8, 4, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_chips_that_share_a_batch_send_nothing_and_give_what_one_device_gives(name: str) -> None:
    fn = OPERATIONS[name]
    program = tpuflow.jit(fn, in_shardings=DATA, out_shardings=DATA).program(X)
    assert not kinds(Executable(program))
    for one, other in zip(both_engines(program, (X,)), jax.tree.leaves(jax.jit(fn)(X)), strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


def test_chips_choose_the_largest_of_their_own_rows() -> None:
    x = np.array([[1, np.nan, 2, np.nan], [3, 3, 3, 1], [0.0, -0.0, -1, 0.0], [-np.inf, 5, np.inf, 5]], np.float32)
    program = tpuflow.jit(_largest, in_shardings=DATA, out_shardings=DATA).program(x)
    assert not kinds(Executable(program))
    whole = tpuflow.jit(_largest).program(x)
    for one, other, jax_own in zip(both_engines(program, (x,)), both_engines(whole, (x,)), lax.top_k(x, 3), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, jax_own)


@pytest.mark.parametrize(
    ("lies", "sent"),
    [(cut(None, "model"), {}), (cut(("data", "model")), {}), (cut("model", "data"), {}), (cut("data", None, "model"), {"all_gather": 1})],
)
def test_only_rows_that_are_cut_themselves_are_gathered(lies: Any, sent: dict[str, int]) -> None:
    x = floats(8, 4, 16)
    program = tpuflow.jit(_largest, in_shardings=lies, out_shardings=cut(*lies.spec[:2])).program(x)
    assert kinds(Executable(program)) == sent
    for one, other in zip(both_engines(program, (x,)), lax.top_k(x, 3), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("axes", [{"data"}, {"data", "model"}])
def test_within_shard_map_a_chip_has_its_own_batch_already(axes: set[str]) -> None:
    mapped = jax.shard_map(_largest, mesh=mesh_of({"data": 2, "model": 4}), in_specs=P("data"), out_specs=P("data"), axis_names=axes)
    x = floats(8, 4, 16)
    program = tpuflow.jit(lambda x: mapped(x * 2), in_shardings=DATA, out_shardings=DATA).program(x)
    assert not kinds(Executable(program))
    for one, other in zip(both_engines(program, (x,)), lax.top_k(x * 2, 3), strict=True):
        np.testing.assert_array_equal(one, other)
