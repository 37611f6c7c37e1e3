"""Ten training steps of the MLP in each policy, run as `python -m tests.ten_steps`: digests of every parameter and of every Program.

A process of its own, because host threads, host instruction sets and hash seeds are chosen when a process starts.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import jax
import numpy as np
import optax

import tpuflow
from models.mlp import MLP
from tpuflow.isa.file import to_bytes
from train.mnist import initial_variables

POLICIES = ("fp32", "fp16", "mixed", "bf16", "mixed_bf16")
STEPS, BATCH = 10, 64


def data(steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    """Images-like floats and labels, `steps` batches of them."""
    rng = np.random.default_rng(7)
    x = rng.random((steps * BATCH, 28, 28), np.float32) * (rng.random((steps * BATCH, 28, 28)) < 0.5)
    return x.astype(np.float32), rng.integers(0, 10, steps * BATCH).astype(np.int32)


def run(policy: str, engine: str = "fast", fidelity: str = "bitexact", **options: Any) -> tpuflow.TrainResult:
    """Ten steps from the exported weights."""
    return tpuflow.train(
        MLP(), data(), policy=policy, optimizer=optax.sgd(1e-2), loss="softmax_cross_entropy", batch_size=BATCH, params=initial_variables(),
        engine=engine, fidelity=fidelity, progress=False, **options,
    )  # fmt: skip


def leaves(result: tpuflow.TrainResult) -> list[np.ndarray]:
    """Every array of parameters and optimizer state."""
    return [np.asarray(x) for x in jax.tree.leaves((result.params, result.opt_state))]


def plain_jit_leaves(policy: str) -> list[np.ndarray]:
    """The same ten steps of the same step function under plain jax.jit."""
    x, y = data()
    made = tpuflow.training_step(MLP(), (x[:BATCH], y[:BATCH]), policy, optax.sgd(1e-2), params=initial_variables())
    state, step = made.state, jax.jit(made.step)
    for i in range(0, STEPS * BATCH, BATCH):
        state, _ = step(state, (x[i : i + BATCH], y[i : i + BATCH]))
    return [np.asarray(a) for a in jax.tree.leaves((state.params, state.opt_state))]


def digest(result: tpuflow.TrainResult) -> dict[str, str]:
    """Hashes of the parameters, the losses, and the Programs' bytes."""
    arrays = hashlib.sha256(b"".join(a.tobytes() for a in leaves(result))).hexdigest()
    programs = hashlib.sha256(b"".join(to_bytes(e.program) for e in result.executables)).hexdigest()
    return {"arrays": arrays, "losses": repr(result.losses), "programs": programs}


if __name__ == "__main__":
    print(json.dumps({policy: digest(run(policy)) for policy in sys.argv[1:] or POLICIES}))
