"""The device's arithmetic as users meet it: through `tpuflow.train`, on both engines and in both fidelities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpuflow

ENGINES = [("reference", "bitexact"), ("fast", "bitexact"), ("fast", "native")]


class Probe(nn.Module):
    """Applies `f` to its input, in the input's type; one parameter, as every model must have, that changes nothing."""

    f: Callable[[Any], Any]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        w = self.param("w", nn.initializers.zeros, (1,))
        return self.f(x) + jnp.where(w > 1, w, -0.0).astype(x.dtype)


def _through_training(f: Callable[[Any], Any], values: list[float], policy: str, engine: str, fidelity: str) -> list[float]:
    """What `f` gives for each value: the losses of a training in which each step sees one value and the loss is the output itself."""
    x = np.asarray(values, np.float32).reshape(-1, 1)
    result = tpuflow.train(
        Probe(f), (x, np.zeros((len(x), 1), np.float32)), policy=policy, optimizer=optax.sgd(0.0), loss=lambda out, _: jnp.sum(out),
        batch_size=1, engine=engine, fidelity=fidelity, progress=False,
    )  # fmt: skip
    return result.losses


GOLDEN = {
    "fp16 overflow then division stays infinite": ("fp16", lambda x: (x * 60000) / 60000, [2.0, 1.0], [np.inf, 1.0]),
    "a third is rounded once": ("fp32", lambda x: x / 3, [1.0, 5.0, 7.0], [float(np.float32(v) / np.float32(3)) for v in (1, 5, 7)]),
    "constants are multiplied one after the other": (
        "fp32", lambda x: (x * 1.1) * 1.3, [3.0, 0.7], [float((np.float32(v) * np.float32(1.1)) * np.float32(1.3)) for v in (3.0, 0.7)],
    ),
    "fp16 keeps subnormals": ("fp16", lambda x: x * 0.5, [2.0**-15, 2.0**-24], [2.0**-16, 0.0]),
    "fp32 flushes subnormals": ("fp32", lambda x: x * 0.5, [2.0**-126, 2.0**-125], [0.0, 2.0**-126]),
    "fp16 rounds before the next operation": ("fp16", lambda x: (x + 0.5) - 2048, [2048.0, 2050.0], [0.0, 2.0]),
    "bf16 rounds before the next operation": ("bf16", lambda x: (x + 0.25) - 128, [128.0, 129.0], [0.0, 1.0]),
    "not a number is reported": ("fp32", lambda x: jnp.log(x), [1.0, -1.0], [0.0, np.nan]),
}  # fmt: skip


@pytest.mark.parametrize(("engine", "fidelity"), ENGINES)
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values_come_through_training(name: str, engine: str, fidelity: str) -> None:
    policy, f, values, wanted = GOLDEN[name]
    np.testing.assert_array_equal(_through_training(f, values, policy, engine, fidelity), wanted)
