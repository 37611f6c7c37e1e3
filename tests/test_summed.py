"""Products of which nothing but the sum over chips is wanted: natively one product, of all chips' terms."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

import tpuflow
from tests.tolerances import sum_bound
from tpuflow.device.fast.engine import FastEngine
from tpuflow.device.fast.translate import Translation
from tpuflow.device.reference import ReferenceEngine

P = PartitionSpec
MESH = AbstractMesh((2, 2), ("e", "d"))
BOTH = ("e", "d")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 5)).astype(np.float32)
ONE_IN_FOUR = np.where(np.arange(32)[:, None] == 9, np.inf, X)


def product(x: Any) -> Any:
    """[rows, 5] -> [5, 3]."""
    return x.T @ jnp.sin(x[:, :3])


def convolved(x: Any) -> Any:
    """The gradient of a kernel, images padded by zeros."""
    images = x.reshape(x.shape[0], 5, 1, 1)

    def loss(w: Any) -> Any:
        return jnp.sum(jnp.sin(lax.conv_general_dilated(images, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))))

    return jax.grad(loss)(jnp.full((3, 1, 1, 4), 0.5))


def twice(x: Any) -> Any:
    """A chip's own is used as well."""
    own = product(x)
    return lax.psum(own, "d") + lax.psum(own * own, "d")


def apart(x: Any) -> Any:
    """Not every chip comes to the product."""
    return lax.psum(lax.cond(lax.axis_index("d") == 0, product, lambda x: jnp.zeros((5, 3)), x), "d")


CASES: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "a sum": (1, lambda x: lax.psum(product(x), "d")),
    "over two axes": (1, lambda x: lax.psum(product(x), BOTH)),
    "a mean": (1, lambda x: lax.psum(product(x) / 2, "d")),
    "turned, scattered": (2, lambda x: lax.psum_scatter(x.T @ x[:, :4], "d", scatter_dimension=1, tiled=True)),
    "filled up, scattered": (2, lambda x: lax.psum_scatter(jnp.pad(product(x).reshape(-1), (0, 1)), BOTH, tiled=True)),
    "of a convolution": (1, lambda x: lax.psum(convolved(x), BOTH)),
    "of all alike": (1, lambda x: lax.psum(jnp.ones((4, 6)) @ jnp.ones((6, 4)) * lax.psum(1, "d"), "d")),
    "a third": (0, lambda x: lax.psum(product(x) / 3, "d")),
    "of a function": (0, lambda x: lax.psum(jnp.tanh(product(x)), "d")),
    "in 16 bits": (0, lambda x: lax.psum(product(x.astype(jnp.float16)), "d")),
    "the greatest": (0, lambda x: lax.pmax(product(x), "d")),
    "used twice": (0, twice),
    "not on all chips": (0, apart),
}


@pytest.mark.slow
@pytest.mark.parametrize("x", [X, ONE_IN_FOUR], ids=["finite", "infinite"])
def test_sums_of_products_over_chips_are_those_of_the_reference_engine(x: np.ndarray) -> None:
    def step(x: Any) -> Any:
        return tuple(fn(x)[None] for _, fn in CASES.values())

    fn = jax.shard_map(step, mesh=MESH, in_specs=P(BOTH), out_specs=P(BOTH), check_vma=False)
    program = tpuflow.jit(fn).program(x)
    expected, _ = ReferenceEngine(program).launch([x])
    native = FastEngine(program).once([x])
    for name, want, got in zip(CASES, expected, native, strict=True):
        bound = 2e-3 if name == "in 16 bits" else sum_bound(256)
        np.testing.assert_allclose(got, want, rtol=bound, atol=20 * bound, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_a_chips_own_product_is_not_made_where_nothing_but_the_sum_is_wanted(name: str) -> None:
    wanted, fn = CASES[name]
    program = tpuflow.jit(jax.shard_map(fn, mesh=MESH, in_specs=P(BOTH), out_specs=P(BOTH), check_vma=False)).program(X)
    assert len(Translation(program, bitexact=False).summed.buffers) == wanted
    assert not Translation(program, bitexact=True).summed.buffers


@pytest.mark.parametrize("summed", [True, False])
def test_a_convolution_summed_over_chips_is_ynnpack_s_only_if_its_kernel_is_small_with_all_chips_terms(summed: bool) -> None:
    """The kernel is the gradient of the images: [14, 14, 16, 32] on each of four chips."""

    def gradient(x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.sum(jnp.sin(lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))))

        found = jax.grad(loss)(jnp.full((3, 3, 8, 32), 0.1))
        return lax.psum(found, BOTH) if summed else found[None]

    fn = jax.shard_map(gradient, mesh=MESH, in_specs=P(BOTH), out_specs=P() if summed else P(BOTH), check_vma=False)
    (made,) = FastEngine(tpuflow.jit(fn).program(jnp.ones((64, 16, 16, 8)))).translate()
    text = made.compile().as_text()
    assert " convolution(" in text and ("ynn_fusion" in text) == (not summed)


SPREAD = """
import jax, numpy as np, tpuflow
from tests.test_summed import BOTH, CASES, MESH, ONE_IN_FOUR, P
from tpuflow.device.fast.engine import FastEngine
from tpuflow.device.fast.host_devices import SpreadHost
step = lambda x: tuple(fn(x)[None] for _, fn in CASES.values())
program = tpuflow.jit(jax.shard_map(step, mesh=MESH, in_specs=P(BOTH), out_specs=P(BOTH), check_vma=False)).program(ONE_IN_FOUR)
alone = FastEngine(program).once([ONE_IN_FOUR])
for devices in (2, 4):
    spread = FastEngine(program, host=SpreadHost(program.mesh, jax.devices()[:devices])).once([ONE_IN_FOUR])
    for name, want, got in zip(CASES, alone, spread, strict=True):
        np.testing.assert_allclose(got, want, rtol=3e-5, atol=3e-4, err_msg=f"{name}, {devices} devices")
"""


TOGETHER = """
import jax, jax.numpy as jnp, numpy as np, tpuflow
from jax import lax
from tests.test_summed import MESH, P, X, product
from tpuflow.device.fast.engine import FastEngine
from tpuflow.device.fast.host_devices import SpreadHost

def step(x):
    sent = lax.psum(x * 2, "d"), lax.all_gather(jnp.sin(x), "d"), lax.psum(product(x), "d"), lax.psum(product(2 * x), "d")
    return sent[0] + 1, sent[1].sum(0), sent[2] * lax.psum(sent[0].sum(), "d"), sent[3]

program = tpuflow.jit(jax.shard_map(step, mesh=MESH, in_specs=P("d"), out_specs=P(), check_vma=False)).program(X)
spread = FastEngine(program, host=SpreadHost(program.mesh, jax.devices()))
(made,) = spread.translate()
assert made.as_text().count("stablehlo.all_gather") == 3, "what chips send, the sums of products, and the sum that needs what is received"
for want, got in zip(FastEngine(program).once([X]), spread.once([X]), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
"""


@pytest.mark.parametrize(
    "script", [pytest.param(SPREAD, marks=pytest.mark.slow, id="the same sums"), pytest.param(TOGETHER, id="together")]
)
def test_the_chips_of_several_devices_are_as_those_of_one(script: str) -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
