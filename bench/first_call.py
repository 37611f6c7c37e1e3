"""The first call of a training step in a new process: with no cache (cold), with one that it fills, with a full one (warm), and under
jax.jit.

Each is a process of its own, which makes model and arrays and is then timed from the call of the step to its results. Nobody keeps anything
unless asked: neither the cold call nor jax.jit's.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.timing import publish

ROUNDS = 3
LIMITS = {"cold": 1.3, "warm": 0.5}
"""Of jax.jit's first call, what a first call may take with no cache, and one that finds all that it needs."""
MODES = {"cold": False, "filling": True, "warm": True, "jax": False}
"""How a step is called first, in this order, and whether there is a cache."""


def _resnet50() -> tuple[Any, Any]:
    from models.resnet import resnet50

    rng = np.random.default_rng(0)
    return resnet50(1000), (rng.random((2, 96, 96, 3), np.float32), rng.integers(0, 1000, 2).astype(np.int32))


def _gpt2() -> tuple[Any, Any]:
    from models.gpt2 import GPT2, NO_DROPOUT, Config

    config = Config(vocab_size=4096, n_embd=384, n_layer=12, n_head=6, n_positions=128, **NO_DROPOUT)
    tokens = np.random.default_rng(0).integers(0, 4096, (2, 128)).astype(np.int32)
    return GPT2(config), (tokens, tokens)


def _bert_large() -> tuple[Any, Any, Any]:
    from train.compile_models import MODELS, Sizes

    subject, sizes = MODELS["bert-large"], Sizes(batch=2, image_size=0, sequence=128, dropout=False)
    return subject.model(sizes), subject.batch(sizes, np.random.default_rng(0)), subject.cross_entropy


WORKLOADS: Mapping[str, Callable[[], tuple[Any, ...]]] = {"resnet50": _resnet50, "gpt2": _gpt2, "bert_large": _bert_large}
"""Name -> what makes model, batch and, where it is not the model's own, loss."""


def measure(workload: str, mode: str) -> dict[str, float]:
    """Seconds of wall and processor time of one first call, by tpuflow or "jax"."""
    import jax
    import optax

    import tpuflow

    model, batch, *loss = WORKLOADS[workload]()
    made = tpuflow.training_step(model, batch, "fp32", optax.sgd(1e-3), *loss)
    jax.block_until_ready(made.state)  # what makes it runs on for a second after it is called
    step = (jax.jit if mode == "jax" else tpuflow.jit)(made.step)
    began, worked = time.perf_counter(), time.process_time()
    jax.block_until_ready(jax.tree.leaves(step(made.state, batch)))
    return {"seconds": time.perf_counter() - began, "processor_seconds": time.process_time() - worked}


def run() -> tuple[str, Mapping[str, Any]]:
    """Medians over rounds, in which the ways take turns."""
    lines = [f"{'step':10} {'cold s':>8} {'filling s':>10} {'warm s':>8} {'jax.jit s':>10} {'cold / jax.jit':>15} {'warm / jax.jit':>15}"]
    rows = {}
    for workload in WORKLOADS:
        rounds = [_round(workload) for _ in range(ROUNDS)]
        row = {mode: {key: statistics.median(r[mode][key] for r in rounds) for key in rounds[0][mode]} for mode in MODES}
        cold, filling, warm, of_jax = (row[mode]["seconds"] for mode in MODES)
        ratios = {mode: row[mode]["seconds"] / of_jax for mode in LIMITS}
        rows[workload] = {**row, "of_jax": ratios, "holds": {mode: ratios[mode] <= limit for mode, limit in LIMITS.items()}}
        lines.append(f"{workload:10} {cold:8.2f} {filling:10.2f} {warm:8.2f} {of_jax:10.2f} {cold / of_jax:15.2f} {warm / of_jax:15.2f}")
    return "\n".join(lines), {"rows": rows, "limits": LIMITS}


def _round(workload: str) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        return {mode: _in_process(workload, mode, folder if kept else "off") for mode, kept in MODES.items()}


def _in_process(workload: str, mode: str, folder: str) -> dict[str, float]:
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"} | {"TPUFLOW_CACHE": folder}
    command = [sys.executable, "-m", "bench.first_call", "--one", workload, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(*sys.argv[2:4])))
    else:
        publish(__doc__, run)
