"""What depth costs an estimate: networks of N and of 10 N layers, from the Flax module to the time of a training step.

Processor seconds of one process, the best of several rounds taken alternately. Layers that come again are emitted and timed once, so ten
times the depth may cost less than ten times as much; with a scan over the layers it costs next to nothing.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from bench.timing import publish
from models.gpt2 import GPT2, TINY
from models.mlp import MLP
from models.norm import BatchNorm
from tpuflow import estimate_training

ROUNDS, TIMES = 3, 10
CHIP, POLICY = "tpu-v5e", "mixed_bf16"
LIMIT = 12.0
"""How many times as long an estimate of ten times the depth may take."""

Made = tuple[nn.Module, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]


class ConvNet(nn.Module):
    """Residual 3x3 convolutions, each normalised: images [B, H, W, C] -> logits [B, 10]."""

    layers: int

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Return the logits [B, 10]."""
        x = images
        for i in range(self.layers):
            x = x + nn.relu(BatchNorm(name=f"bn{i}")(nn.Conv(x.shape[-1], (3, 3), name=f"conv{i}")(x), train))
        return nn.Dense(10)(x.mean(axis=(1, 2)))


class Recurrent(nn.Module):
    """A recurrent network whose steps are written out, all with the same weights: [B, steps, F] -> logits [B, 10]."""

    steps: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Return the logits [B, 10]."""
        state, reads = nn.Dense(256), nn.Dense(256)
        h = jnp.zeros((x.shape[0], 256))
        for step in range(self.steps):
            h = jnp.tanh(state(h) + reads(x[:, step]))
        return nn.Dense(10)(h)


def mlp(layers: int) -> Made:
    """Dense layers with ReLU."""
    return MLP((256,) * layers), (jax.ShapeDtypeStruct((64, 256), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32))


def convolutions(layers: int) -> Made:
    """Residual convolutions."""
    return ConvNet(layers), (jax.ShapeDtypeStruct((32, 16, 16, 64), jnp.float32), jax.ShapeDtypeStruct((32,), jnp.int32))


def recurrent(steps: int) -> Made:
    """A recurrent network, its steps written out."""
    return Recurrent(steps), (jax.ShapeDtypeStruct((8, steps, 128), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32))


def transformer(layers: int, *, scan: bool = False) -> Made:
    """Decoder layers, written out or in a scan."""
    tokens = jax.ShapeDtypeStruct((4, 128), jnp.int32)
    return GPT2(dataclasses.replace(TINY, n_positions=128, n_embd=128, n_layer=layers, scan=scan)), (tokens, tokens)


NETWORKS: Mapping[str, tuple[Callable[[int], Made], int]] = {
    "mlp": (mlp, 10),
    "convolutions": (convolutions, 6),
    "recurrent": (recurrent, 20),
    "transformer": (transformer, 3),
    "transformer, scan": (lambda layers: transformer(layers, scan=True), 3),
}
"""Name -> network by depth, and the smaller depth."""


def seconds(make: Callable[[int], Made], layers: int) -> float:
    """Processor seconds of one estimate."""
    gc.collect()
    began = time.process_time()
    estimate_training(*make(layers), chip=CHIP, policy=POLICY)
    return time.process_time() - began


def measure(make: Callable[[int], Made], layers: int, rounds: int = ROUNDS) -> tuple[float, float]:
    """The least seconds of N and of 10 N layers, after a first estimate that fills JAX's caches."""
    seconds(make, 1)
    pairs = [(seconds(make, layers), seconds(make, TIMES * layers)) for _ in range(rounds)]
    few, many = (min(column) for column in zip(*pairs, strict=True))
    return few, many


def run() -> tuple[str, Mapping[str, Any]]:
    """A row for each network."""
    rows, lines = {}, [f"{'network':18} {'layers':>9} {'seconds':>15} {'ratio':>6}"]
    for name, (make, layers) in NETWORKS.items():
        few, many = measure(make, layers)
        rows[name] = {"layers": [layers, TIMES * layers], "seconds": [few, many], "ratio": many / few}
        lines.append(f"{name:18} {layers:3} to {TIMES * layers:3} {few:6.2f} to {many:5.2f} {many / few:6.1f}")
    return "\n".join(lines), {"limit": LIMIT, "rows": rows}


if __name__ == "__main__":
    publish(__doc__, run)
