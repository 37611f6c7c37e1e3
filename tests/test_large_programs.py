"""Programs that fill much of the host's memory: XLA orders their work for the least memory, which changes no bit."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import tpuflow
from tpuflow.device.fast import engine
from tpuflow.device.fast.engine import FastEngine
from tpuflow.device.limits import occupied_bytes

LAYERS, WIDTH = 6, 64


def gradients(kernels: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    """Of a chain of convolutions: each is independent of the others', and XLA could compute them side by side."""

    def loss(kernels: list[jax.Array]) -> jax.Array:
        y = x
        for kernel in kernels:
            y = jnp.tanh(jax.lax.conv_general_dilated(y, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
        return jnp.sum(y * y)

    return jax.grad(loss)(kernels)


@pytest.mark.slow
def test_a_large_program_takes_less_of_the_hosts_memory_and_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    kernels = [rng.normal(0, 0.04, (3, 3, WIDTH, WIDTH)).astype(np.float32) for _ in range(LAYERS)]
    x = rng.normal(0, 1, (1, 8, 8, WIDTH)).astype(np.float32)
    program = tpuflow.jit(gradients).lower(kernels, x).compile().executable.program
    found = []
    for bound in (engine.LARGE_BYTES, occupied_bytes(program)):
        monkeypatch.setattr(engine, "LARGE_BYTES", bound)
        made = FastEngine(program)
        (executable,) = made.translate()
        found.append((executable.compile().memory_analysis().temp_size_in_bytes, made.once([*kernels, x])))
    (side_by_side, expected), (least, results) = found
    assert least < side_by_side
    for one, other in zip(results, expected, strict=True):
        np.testing.assert_array_equal(one, other)
